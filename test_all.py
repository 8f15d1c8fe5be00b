"""Every claim the code makes, asserted: `python -m pytest -q test_all.py` (3 to 4 minutes)."""

import ast
import contextlib
import copy
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import tyro
from matplotlib.figure import Figure
from torch import nn

import antmaze
import baselines_dco_diayn as baselines
import evaluate
import gridworld
import laprep
import tatc
from antmaze import mujoco  # antmaze chooses the OpenGL, so MuJoCo must not be imported before it
from gridworld import UsageError

ROOT = Path(__file__).parent
SCRIPTS = {"gridworld": gridworld, "antmaze": antmaze, "tatc": tatc, "laprep": laprep,
           "baselines_dco_diayn": baselines, "evaluate": evaluate}
GRID, ANT = gridworld.GridWorldVec, antmaze.AntMazeVec
TATC, LAP, DCO, DIAYN, SHAPING = tatc.Args, laprep.Args, baselines.DCO, baselines.DIAYN, evaluate.Shaping
CORRIDOR = "S.................G\n...................\n"  # small enough to learn in seconds
SMALL_MAZE = "#####\n#..G#\n#.#.#\n#S..#\n#####\n"  # a ring of 8 states
SMALL = {
    TATC: dict(updates=11, num_envs=6, hidden=16, skill_length=6, episode_length=18, log_every=3),
    LAP: dict(prior="uniform", updates=60, log_every=20, hidden=32, num_envs=8, samples=400, batch_size=32),
    DCO: dict(num_skills=2, samples=4000, num_envs=8, f_updates=10, f_batch_size=256, policy_updates=10,
              tau=0.05, hidden=(32, 32), batch_size=64, episode_length=20, skill_length=20, log_every=4),
    DIAYN: dict(num_skills=3, updates=30, num_envs=4, hidden=(16, 12), learning_starts=20, batch_size=16,
                buffer_size=50, episode_length=9, skill_length=5, log_every=7),
    SHAPING: dict(env="antmaze1", reward="xy", steps=480, num_envs=4, warmup=60, eval_every=12, horizon=30,
                  eval_episodes=2, hidden=16, batch_size=8),
}
ANT_TATC = dict(env="antmaze1", skill_length=20, episode_length=40)
ANT_DCO = dict(env="antmaze1", num_envs=4, samples=200, episode_length=10, f_updates=4, policy_updates=4,
               hidden=(8, 6), skill_length=3, batch_size=5)
exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-12)
torch.set_num_threads(1)


def write(folder, text, name="maze.txt"):
    path = folder / name
    path.write_text(text)
    return str(path)


def cli(command, guard=lambda main: main(), **names):
    """`python command` in this process, to save the imports, with {names}; what it refuses is raised."""
    script, *words = [word.format(**names) for word in shlex.split(command, comments=True)]
    module = SCRIPTS[Path(script).stem]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        run = getattr(module, "train", None) or module.main
        guard(run if module is evaluate else lambda: run(tyro.cli(module.Args)))


def shell(command, **names):
    """The same as a shell sees it: exit code, stdout and stderr."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli(command, gridworld.guarded, **names)
    except SystemExit as stop:
        code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def parsed(command):
    """The arguments of `python command`."""
    script, *words = shlex.split(command, comments=True)
    if script == "evaluate.py":
        return tyro.cli(evaluate.COMMANDS[words[0]][0], args=words[1:])
    return tyro.cli(SCRIPTS[Path(script).stem].Args, args=words)


def small(kind, folder, name="run", **values):
    """The arguments of a run of seconds in folder/name."""
    env = write(folder, SMALL_MAZE if kind is LAP else CORRIDOR)
    return kind(**dict(env=env, run_dir=str(folder / name)) | SMALL[kind] | values)


def checkpoint(run_dir):
    return torch.load(Path(run_dir) / "checkpoint.pt", weights_only=True)


def trained(args):
    """The checkpoint after training."""
    if isinstance(args, SHAPING):
        evaluate.evaluate_shaping(args)
    else:
        sys.modules[type(args).__module__].train(args)
    return checkpoint(args.run_dir)


def metrics(run_dir):
    """The rows of the run's only CSV file, without what time it took."""
    with open(next(Path(run_dir).glob("*.csv")), newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"}
                for row in csv.DictReader(file)]


def files(folder, pattern="*"):
    """{path: content} of all files, but for the locks of runs."""
    return {path: path.read_bytes() for path in Path(folder).rglob(pattern)
            if path.is_file() and path.name not in (".lock", ".pid")}


def assert_same_tree(a, b, path=""):
    """Trees of dicts, lists, tensors and values are equal, beside what differs between run directories."""
    assert type(a) is type(b), path
    if isinstance(a, (list, tuple)):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in set(a) - {"seconds", "run_dir", "results_dir", "resume"}:
            assert_same_tree(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    else:
        assert a == b, path


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take longer than the runs here."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).touch())


# -------------------------------------------------------------------------------------------------- gridworld
@pytest.mark.parametrize("name, shape, states, furthest, steps", [  # steps from (1, 1), the goal's first
    ("umaze", (30, 30), 172, 85, {(1, 30): 85}), ("4rooms", (21, 21), 403, 59, {(1, 21): 58}),
    ("tmaze", (30, 40), 450, 53, {(25, 30): 53, (40, 1): 39})])
def test_moves_and_distances_against_brute_force_and_the_papers_sizes(
        tmp_path, name, shape, states, furthest, steps):
    env, rows, goal = GRID(name), gridworld.MAZES[name].split("\n"), next(iter(steps))
    free = {(x + 1, len(rows) - y) for y, row in enumerate(rows) for x in range(len(row)) if row[x] != "#"}
    index = {tuple(xy): state for state, xy in enumerate(env.truth_xy.tolist())}
    assert set(index) == free and len(index) == env.num_states == states and env.free.shape == shape
    for (x, y), state in index.items():
        around = (x, y + 1), (x + 1, y), (x, y - 1), (x - 1, y)
        assert env.next_state[state].tolist() == [index.get(xy, state) for xy in around]
    distance = np.where(np.eye(states), 0, np.inf)
    for _ in range(2 * furthest):
        distance = np.minimum(distance, 1 + distance[env.next_state].min(1))
    assert np.array_equal(env.distance, distance)
    assert (env.start_index, env.goal_index) == (index[1, 1], index[goal])
    assert {xy: env.cell_distance[index[xy]] for xy in steps} == steps and env.cell_distance.max() == furthest
    picture = tmp_path / "maze.png"
    assert shell("gridworld.py --maze {maze} --picture {path}", maze=name, path=picture) == (0, (
        f"{name}: {states} states, furthest {furthest} steps from s0, goal {steps[goal]} steps away\n"
        f"picture: {picture}\n"), "")
    assert picture.stat().st_size > 5000


def test_laplacian_and_values_against_definitions():
    env, gamma = GRID("4rooms"), 0.98
    walk = np.eye(env.num_states)[env.next_state].mean(1)
    values, vectors = env.laplacian_eigenvectors(3)
    assert np.allclose(vectors - walk @ vectors, vectors * values, atol=1e-9)
    assert np.allclose(vectors.T @ vectors, np.eye(3))
    assert np.allclose(values, np.linalg.eigvalsh(np.eye(env.num_states) - walk)[:3])
    policy = np.random.default_rng(0).dirichlet(np.ones(4), env.num_states)
    best = followed = np.zeros(env.num_states)
    for _ in range(1000):
        best, followed = (np.where(env.next_state == env.goal_index, 1.0, gamma * values[env.next_state])
                          for values in (best, followed))
        best, followed = best.max(1), (policy * followed).sum(1)
        best[env.goal_index] = followed[env.goal_index] = 0
    assert np.allclose(env.optimal_values(gamma), best, atol=1e-6)
    assert np.allclose(env.policy_values(policy, gamma), followed, atol=1e-6)


def test_vector_env_against_single_envs(tmp_path):
    """Observations, rewards, ends and autoreset of the batch are those of Gymnasium's own SyncVectorEnv."""
    path, ends = write(tmp_path, "S..\n..G\n"), np.zeros(2)
    batch = GRID(path, 50, 0, max_episode_steps=120)  # a single one has no limit of 100 of its own
    sync = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.wrappers.TimeLimit(gridworld.GridWorldEnv(path), 120)] * 50)
    assert np.array_equal(batch.reset()[0], sync.reset()[0])
    for actions in np.random.default_rng(1).integers(4, size=(300, 50)):
        actions[:30] = 3  # these stay at S
        (*ours, _), (*theirs, _) = batch.step(actions), sync.step(actions)
        theirs[3] &= ~theirs[2]
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs)) and np.array_equal(ours[1], ours[2])
        ends += ours[2].sum(), ours[3].sum()
    assert (ends > 50).all()


def test_gridworld_renders_its_cells():
    env = gymnasium.make("TATC/4Rooms-v0", render_mode="rgb_array")
    env.reset(seed=0)
    env.step(1)
    cells = np.where(env.unwrapped.vec.free[..., None], 255, 90).repeat(3, axis=2)
    cells[0, 0], cells[20, 1] = (60, 180, 75), (214, 39, 40)  # goal green, agent red
    picture = env.render()
    assert picture.dtype == np.uint8 and np.array_equal(picture, np.kron(cells, np.ones((16, 16, 1))))
    assert len(GRID("4rooms", 3, render_mode="rgb_array").render()) == 3 and GRID("4rooms").render() is None


# -------------------------------------------------------------------------------------------------- maze text
@pytest.mark.parametrize("text, reason", [
    ("", "empty"), ("\n\n", "empty"), ("S..\n..\n", "line 2: 2 characters but line 1 has 3"),
    ("...\n...\n", "0 start cells"), ("S.S\n", "2 start cells"), ("S.G\n..G\n", "line 2: a second goal"),
    ("S..#G\n", "line 1: the goal cannot be reached"), ("S.\n.x\n", "line 2: unknown character 'x'"),
    ("#.\nS#\n", "line 2: 1 cells can be reached"), ("SG\n", "line 1: 2 cells can be reached"),
    ("S" + 10**6 * ".", "not a text file of at"),
    ("S" + 249 * "." + 249 * ("\n" + 250 * "."), "62500 free cells; use at most {most}"),
    ("\udcff", "is not UTF-8 text")])
def test_malformed_mazes_are_refused_at_once_by_line_and_reason(tmp_path, text, reason):
    path, begin = tmp_path / "maze.txt", time.process_time()
    path.write_bytes(text.encode(errors="surrogateescape"))
    for script, most in (("gridworld.py", 6000), ("antmaze.py", 200)):
        code, _, err = shell(f"{script} --maze {{path}}", path=path)
        assert code == 2 and err.startswith(f"{script}: {path}") and err.count("\n") == 1
        assert reason.format(most=most) in err
    assert time.process_time() - begin < 2


# ---------------------------------------------------------------------------------------------------- antmaze
def ant_actions(steps, ants, seed=0):
    return np.random.default_rng(seed).integers(0, 5, (steps, ants, 8))


def physics(env):
    return env.get_state()["rows"][:, 1:30]


def block(env, xy):
    column, row = ((np.asarray(xy) - env.corner) / antmaze.BLOCK * (1, -1)).astype(int).T
    return row, column


def test_ant_is_the_standard_ant_and_the_fast_model_accelerates_as_the_plain_one():
    env, touching = ANT("antmaze1", 16), 0
    models = model, _ = env.model, antmaze.build_model(env.free, env.start_block, plain=True)
    assert model.opt.timestep == 0.02 and model.opt.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    assert (model.actuator_gear[:, 0] == 30).all() and np.array_equal(model.actuator_trnid[:, 0], range(1, 9))
    hips, ankles = np.rad2deg(model.jnt_range[1::2]), np.rad2deg(model.jnt_range[2::2])
    assert np.allclose(hips, [-30, 30]) and np.allclose(ankles, [[30, 70], [-70, -30], [-70, -30], [30, 70]])
    ball, rod = 4 / 3 * np.pi * 0.08**3, np.pi * 0.08**2
    legs = 4 * (2 * (ball + rod * 0.08**0.5) + ball + rod * 0.32**0.5)
    assert np.isclose(model.body_subtreemass[1], 5 * (4 / 3 * np.pi * 0.25**3 + legs))
    for action in ant_actions(60, 16):
        env.move(action)
        for state, torque in zip(physics(env)[::4], action[::4] / 2 - 1):
            if np.abs(state[:2]).max() > 0.7:  # the longest leg reaches 1.21, walls are 2 away
                continue
            both = [mujoco.MjData(model) for model in models]
            for model, data in zip(models, both):
                data.qpos[:], data.qvel[:], data.ctrl[:] = state[:15], state[15:], torque
                mujoco.mj_forward(model, data)
            touching += both[1].ncon > 0
            assert np.abs(both[0].qacc - both[1].qacc).max() < 1e-6
    assert touching > 50


def test_ant_results_depend_on_seed_and_state_alone_not_on_the_thread_count():
    envs = [ANT("antmaze2", 6, seed, threads, start="uniform", max_episode_steps=30)
            for seed, threads in ((5, 1), (5, 2), (5, 3), (6, 1))]
    for action in ant_actions(30, 6):  # then all are truncated, and begin anew in the next step
        for env in envs:
            env.step(action)
    assert [np.array_equal(envs[0].obs, env.obs) for env in envs] == [True, True, True, False]
    envs[3].set_state(envs[0].get_state())
    ends = 0
    for step, action in enumerate(ant_actions(35, 6, seed=1)):  # crosses the next truncation
        results = [env.step(action)[:4] for env in envs]
        assert all(np.array_equal(a, b) for other in results for a, b in zip(results[0], other))
        ends += results[0][3].sum()
        for env in envs if step == 20 else ():
            env.place(np.arange(6) < 3, "uniform")
    assert ends > 3
    for env in envs[1:]:
        assert_same_tree(*(gridworld.as_tensors(one.get_state()) for one in (envs[0], env)))


def test_ant_actions_are_five_equally_spaced_torques_and_obs_is_never_overwritten():
    index, torque = ANT("antmaze1", 5), ANT("antmaze1", 5)
    first, kept = index.obs, index.obs.copy()
    second = index.move(np.arange(5)[:, None].repeat(8, 1))
    torque.move(np.array([-1, -0.5, 0, 0.5, 1])[:, None].repeat(8, 1))
    assert np.array_equal(physics(index), physics(torque))
    assert first.shape == (5, 29) and first.dtype == np.float32 and np.array_equal(first, kept)
    assert second is index.obs and np.array_equal(second, physics(index).astype(np.float32))
    index.move(np.full((5, 8), 7.0))  # floats are clipped
    torque.move(np.full((5, 8), 1.0))
    assert np.array_equal(physics(index), physics(torque))
    assert np.allclose(index.obs_scale, [0.15] * 2 + [1] * 13 + [0.5] * 3 + [0.3] * 3 + [0.2] * 8)
    assert np.allclose(index.phi_scale / index.obs_scale, [4] * 2 + [0.02] * 27)


@pytest.mark.parametrize("how, maze, steps", [("random", "antmaze1", 300), ("full torque", "antmaze2", 500),
                                              (4.0, "antmaze1", 40), (8.0, "antmaze1", 40)])
def test_ants_random_at_full_torque_or_thrown_at_the_walls_stay_finite_and_inside(how, maze, steps):
    env, actions = ANT(maze, 36, start="s0" if how == "random" else "uniform"), ant_actions(steps, 36)
    if how == "full torque":
        actions = actions // 3 * 4
    elif how != "random":  # a speed, in all directions
        actions[:], angle, states = 2, np.arange(36) * np.pi / 18, physics(env)
        states[:, 15:18] = np.stack([how * np.cos(angle), how * np.sin(angle), np.full(36, 4)], axis=1)
        env.place(np.ones(36, bool), states)
    for action in actions:
        obs = env.move(action)
        assert np.isfinite(obs).all() and env.free[block(env, obs[:, :2])].all()
    assert env.diverged == 0
    if how == "random":  # neither lives on its back nor stands still
        assert env.fallen().mean() <= 0.25 and np.linalg.norm(env.obs[:, :2], axis=1).mean() > 0.6


def test_ant_divergence_is_caught_counted_and_reset():
    env, bad = ANT("antmaze1", 5), [False, True, True, True, True]
    state = env.get_state()
    rows = state["rows"][:, 1:30]
    rows[1, 2], rows[2, 20], rows[3, 0], rows[4, :2] = np.nan, 1e12, 100.0, (6.0, 6.0)  # the last in a wall
    env.set_state(state)
    obs = env.move(np.zeros((5, 8)))
    assert env.diverged == 4 and env.last_diverged.tolist() == bad
    assert np.isfinite(obs).all() and (np.abs(obs[1:, :2]) <= 0.1).all()
    env.move(np.zeros((5, 8)))
    assert env.diverged == env.get_state()["diverged"] == 4 and not env.last_diverged.any()
    env.set_state(state)
    _, reward, terminated, truncated, info = env.step(np.zeros((5, 8)))
    assert truncated.tolist() == info["diverged"].tolist() == bad and env.diverged == 4
    assert not terminated.any() and not reward.any()


def test_ant_uniform_starts_and_fallen():
    env = ANT("antmaze2", 4000, start="uniform")  # in every block, off the walls
    for offset in itertools.product((-0.89, 0, 0.89), repeat=2):
        counts = np.zeros(env.free.shape, int)
        np.add.at(counts, block(env, env.obs[:, :2] + offset), 1)
        assert counts[~env.free].sum() == 0
        assert any(offset) or counts[env.free].min() > 4000 / env.free.sum() / 3
    assert np.allclose(np.linalg.norm(env.obs[:, 3:7], axis=1), 1)
    env.move(ant_actions(1, 4000)[0])
    before, states = env.get_state()["rows"], env.truth_obs[:3].copy()
    states[:, 3:7] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0.8, 0.6]]
    env.place(np.arange(4000) < 3, states)
    assert env.fallen()[:3].tolist() == [False, True, True]
    assert np.array_equal(env.get_state()["rows"][3:], before[3:])  # and nothing else of the others changed


@pytest.mark.parametrize("name, blocks, boxes, states, to_goal", [
    ("antmaze1", 13, 1, 153, 43.24264), ("antmaze2", 17, 3, 201, 53.24264),
    ("antmaze-large", 46, 11, 558, 45.45584)])
def test_ant_walls_and_geodesics(name, blocks, boxes, states, to_goal):
    env, origin = ANT(name, 1), np.zeros(2)
    inner = env.free[1:-1, 1:-1]
    covered = np.zeros_like(inner)
    for top, bottom, left, right in antmaze.wall_boxes(inner):
        covered[top:bottom, left:right] = True
    assert np.array_equal(covered, ~inner)
    assert (env.model.geom_type == mujoco.mjtGeom.mjGEOM_BOX).sum() == boxes
    assert env.free.sum() == blocks and env.num_cells == 16 * blocks == len(env.cell_xy)
    assert len(env.truth_obs) == states and np.array_equal(env.distance, env.distance.T)
    assert np.array_equal(env.truth_xy[[env.start_index, env.goal_index]], [origin, env.goal_xy])
    assert abs(env.distance[env.start_index, env.goal_index] - to_goal) < 1e-3
    assert np.array_equal(env.cell(env.cell_xy), range(env.num_cells))
    assert env.free[block(env, env.cell_xy)].all()
    assert np.allclose(env.geodesic(env.truth_xy, env.goal_xy), env.distance[env.goal_index])
    assert np.allclose(env.geodesic(np.array([[10.0, 0], [10, 1], [1, 1]]), origin), [10, 9 + 2**0.5, 2**0.5])
    corner = env.corner + (4.5, -4 * env.free.shape[0] + 4.5)
    assert np.array_equal(env.cell_xy[env.cell(np.array([[-99.0, -99.0]]))], [corner])


def test_ant_geodesic_does_not_cut_corners_and_a_maze_needs_no_goal(tmp_path):
    env = ANT(write(tmp_path, "..\nS#\n"), 2)  # beyond the text is wall
    assert env.goal_xy is None and env.goal_index is None and env.num_cells == 48
    # From (0, 0) to (4, 4): the way keeps 0.5 from the corner (2, 2), so it bends at (1.5, 2.5).
    assert np.isclose(env.geodesic(np.array([[4.0, 4.0]]), np.zeros(2))[0], 2 * (1.5 * 2**0.5 + 1))
    _, reward, terminated, *_ = env.step(np.zeros((2, 8)))
    assert not reward.any() and not terminated.any()


def test_ant_eigenvectors_against_the_graphs_own():
    env = ANT("antmaze1", 1)
    points = env.corner + [(i / 2, -j / 2) for i in range(1, 56) for j in range(1, 56)]
    clear = [env.free[block(env, points + offset)] for offset in itertools.product((-0.4, 0.4), repeat=2)]
    points = points[np.all(clear, axis=0)]  # at least 0.5 from any wall
    beside = np.linalg.norm(points[:, None] - points, axis=2) == 0.5
    exact_values, exact = np.linalg.eigh(np.diag(beside.sum(1)) - 1.0 * beside)
    exact = exact[(points == env.truth_xy[:, None]).all(2).argmax(1), :6]
    values, vectors = env.laplacian_eigenvectors(6)
    assert np.diff(exact_values[:7]).min() > 1e-4 and np.allclose(values, exact_values[:6], atol=1e-9)
    assert np.allclose(vectors * np.sign((vectors * exact).sum(0)), exact, atol=1e-8)


def test_ant_goal_task_terminates_truncates_and_resets_on_the_next_step():
    env, one = ANT("antmaze1", 3, max_episode_steps=4), np.array([False, True, False])
    single, state = antmaze.AntMazeEnv("antmaze1"), env.truth_obs[[env.goal_index]].copy()
    state[0, 0] += 1.8
    env.place(one, state)
    assert np.array_equal(single.reset(options={"start": state})[0], state[0])
    obs, reward, terminated, truncated, info = env.step(np.zeros((3, 8)))
    for found in (reward, terminated, info["is_success"]):
        assert np.array_equal(found, one)
    alone = single.step(np.zeros(8))
    assert alone[1:] == (1.0, True, False, {"is_success": True, "diverged": False})
    assert np.array_equal(alone[0], obs[1]) and not truncated.any()
    obs, reward, terminated, truncated, _ = env.step(np.zeros((3, 8)))  # the reset step of ant 1
    assert not (reward.any() or terminated.any() or truncated.any()) and np.abs(obs[1, :2]).max() <= 0.1
    ends = [env.step(np.zeros((3, 8)))[3].tolist() for _ in range(4)]
    assert ends == [[False] * 3, [True, False, True], [False] * 3, [False, True, False]]
    state[0, 0] += 0.5  # beyond the radius
    single.reset(options={"start": state})
    for _ in range(1001):  # no limit of 1000 of its own: gymnasium.make adds the one asked for
        assert single.step(np.zeros(8))[2:4] == (False, False)


def test_ant_pictures_need_opengl(monkeypatch):
    try:
        picture = ANT("antmaze1", 2, render_mode="rgb_array").render()[1]
    except UsageError:
        pass
    else:
        assert picture.shape == (480, 480, 3) and picture.dtype == np.uint8 and picture.std() > 10
    monkeypatch.setattr(ANT, "no_opengl", ANT.no_opengl)  # as it was, for other tests
    monkeypatch.setattr(mujoco, "Renderer", None)  # fails like a machine without OpenGL
    with pytest.raises(UsageError, match="rendering needs OpenGL .*; set MUJOCO_GL=egl or osmesa"):
        gymnasium.make("TATC/AntMaze1-v0", render_mode="rgb_array").unwrapped.render()
    assert ANT("antmaze1", 2).render() is None


def test_ants_cost_little_more_than_bare_mujoco_and_the_whole_loop_not_much_more():
    cost = antmaze.benchmark("antmaze1", 0, rounds=3, seconds=0.1)
    assert cost["antmaze.py"] < 1.5 * cost["mujoco.batch, same model"]
    spent = {}
    for name, run in evaluate.loop_contenders(updates=2)[1].items():
        begin = time.process_time()
        run()
        spent[name] = time.process_time() - begin
    assert spent["mujoco.batch, same steps"] > 0.3 * spent["tatc.py, whole loop"]


# ------------------------------------------------------------------------------------------ every environment
IDS = {"UMaze": GRID, "TMaze": GRID, "4Rooms": GRID, "AntMaze1": ANT, "AntMaze2": ANT, "AntMazeLarge": ANT}


@pytest.mark.filterwarnings("ignore")  # "observation space is infinite", as for Gymnasium's own ants
@pytest.mark.parametrize("package", ["gymnasium.utils", "stable_baselines3.common"])
@pytest.mark.parametrize("name", IDS)
def test_checkers_accept_the_environments(name, package):
    check_env, ant = pytest.importorskip(f"{package}.env_checker").check_env, IDS[name] is ANT
    for arguments in ({"discrete": True}, {}) if ant else ({},):
        env = gymnasium.make(f"TATC/{name}-v0", **arguments)
        check_env(env.unwrapped, skip_render_check=ant or package != "gymnasium.utils")
        vector = gymnasium.make_vec(f"TATC/{name}-v0", num_envs=3, **arguments)
        assert vector.single_action_space == env.action_space
        assert type(vector) is IDS[name] and vector.metadata["autoreset_mode"].name == "NEXT_STEP"
    assert gridworld.TITLES[vector.name].replace("-", "").lower() == name.lower()
    assert env.spec.max_episode_steps == vector.max_episode_steps == (1000 if ant else 100)
    assert np.array_equal(vector.reset(seed=1)[0], vector.reset(seed=1)[0])


@pytest.mark.parametrize("kind", [GRID, ANT])
def test_placement_reset_options_and_state_round_trip(kind):
    env, every, few = kind(num_envs=4000, seed=0), np.ones(4000, dtype=bool), np.arange(4000) < 7

    def at_s0(obs):  # within the noise of an ant's pose
        xy = env.truth_xy[obs] if kind is GRID else obs[:, :2]
        return np.abs(xy - env.truth_xy[env.start_index]).max() <= 0.1
    state, start = env.get_state(), env.obs
    env.place(every, "uniform")
    first, kept = env.obs, env.obs.copy()
    assert at_s0(start) and (kind is ANT or len(np.unique(first)) == env.num_states)
    env.set_state(state)
    env.place(every, "uniform")
    assert np.array_equal(env.obs, first)
    env.place(few, env.truth_obs[20:27])
    assert np.array_equal(env.obs[few], env.truth_obs[20:27]) and np.array_equal(env.obs[~few], first[~few])
    env.step(env.action_space.sample())
    assert at_s0(env.reset()[0]) and not env.fallen().any()
    again = env.reset(seed=3, options={"start": "uniform"})[0]
    mixed = env.reset(options={"reset_mask": few})[0]
    assert at_s0(mixed[few]) and np.array_equal(mixed[~few], again[~few])
    assert np.allclose(env.reset(options={"start": first})[0], first, rtol=0, atol=1e-6)
    assert np.array_equal(env.reset(seed=3, options={"start": "uniform"})[0], again)
    assert np.array_equal(first, kept)  # what was handed out is never overwritten
    assert gridworld.GridWorldEnv("umaze").reset(options={"start": 5}) == (5, {})
    env = kind(num_envs=3, seed=0, max_episode_steps=2)
    env.step(env.action_space.sample())
    env.reset(options={"reset_mask": np.arange(3) < 1})  # its episode begins anew, the others' go on
    assert env.step(env.action_space.sample())[3].tolist() == [False, True, True]


@pytest.mark.parametrize("kind", [GRID, ANT])
def test_constructors_refuse_bad_input(kind):
    values = [("maze", "nowhere"), ("num_envs", 0), ("num_envs", 2**20 + 1), ("num_envs", 1.5), ("seed", -1),
              ("num_envs", math.inf), ("seed", "a"), ("max_episode_steps", 0), ("start", "goal"),
              ("render_mode", "human"), ("num_threads", 0)]
    for argument, value in values[:-1] if kind is GRID else values:
        with pytest.raises(UsageError, match=f"^{value if argument == 'maze' else argument} "):
            kind(**{argument: value})


@pytest.mark.parametrize("kind, message, calls", [
    (GRID, r"actions must be 2 integers in 0\.\.3", [
        ("step", [0, 4]), ("step", [-1, 0]), ("step", [0.0, 1.0]), ("step", [0] * 3)]),
    (GRID, "reset_mask has shape", [("reset", {"reset_mask": np.ones(2)})]),
    (GRID, "where must be", [("reset", {"start": start}) for start in ("goal", [0, 10**4], [0])]),
    (GRID, "not 2 states of umaze", [("set_state", GRID(num_envs=3).get_state()),
                                     ("set_state", GRID(num_envs=2).get_state() | {"obs": [0, 10**4]})]),
    (ANT, r"actions must have shape \(2, 8\)", [("move", np.zeros((2, 7))), ("step", np.zeros((3, 8)))]),
    (ANT, "actions must be finite", [("move", np.full((2, 8), bad)) for bad in (np.nan, np.inf)]),
    (ANT, r"actions must be indices 0\.\.4, got 5\.\.5", [("move", np.full((2, 8), 5))]),
    (ANT, "actions must be integers", [("move", np.full((2, 8), "x"))]),
    (ANT, "mask must be bool of shape", [("place", np.ones(3, bool), "s0"), ("place", np.ones(2), "s0")]),
    (ANT, "where must be", [("reset", {"start": start}) for start in (
        "goal", np.ones((1, 29)), np.full((2, 29), np.nan))]),
    (ANT, "where must hold unit quaternions", [("reset", {"start": np.zeros((2, 29))})]),
    (ANT, "rows of shape", [("set_state", ANT(num_envs=3).get_state())])])
def test_methods_refuse_bad_input_and_change_nothing(kind, message, calls):
    for method, *arguments in calls:
        env = kind(num_envs=2, seed=0)
        before = env.obs.copy()
        with pytest.raises(UsageError, match=message):
            env.reset(options=arguments[0]) if method == "reset" else getattr(env, method)(*arguments)
        assert np.array_equal(env.obs, before)
        assert kind is GRID or np.array_equal(np.float32(physics(env)), before)


def test_environments_have_what_trainers_need_and_names_that_follow_their_content(tmp_path, capsys):
    for name in gridworld.MAZES | antmaze.MAZES:
        env = antmaze.make_env(name, 2, 0)
        before = env.obs.copy()
        antmaze.check_environment(env, 2, name)  # its trial step is taken back
        assert env.name == name and np.array_equal(env.obs, before)
        assert type(env) is (ANT if name in antmaze.MAZES else GRID)
    texts = {"my maze.v2.txt": "S G#.\n   #.\n", "mine.py": (
        "import gridworld\n"
        "def build(num_envs, seed):\n"
        "    return gridworld.GridWorldVec('tmaze', num_envs, seed)\n")}
    maze, own = (write(tmp_path, text, name) for name, text in texts.items())
    codes = [hashlib.sha256(text.encode()).hexdigest()[:6] for text in texts.values()]
    for env, name in ((maze, f"my_maze.v2-{codes[0]}"), (f"ant:{maze}", f"ant-my_maze.v2-{codes[0]}")):
        env = antmaze.make_env(env, 1, 0)
        assert env.name == name and np.array_equal(env.free, [[1, 1, 1, 0, 0]] * 2)
        assert np.isfinite(env.distance).all() and env.distance[env.start_index, env.goal_index] in (2, 8)
        warning = f"{maze}: 2 free cells cannot be reached from S and count as walls\n"
        assert capsys.readouterr().err == warning
    env = antmaze.make_env(f"{own}:build", 3, 4)
    assert env.obs.shape == (3,) and env.name == f"build-mine-{codes[1]}"
    assert env.rng.random() == np.random.default_rng(4).random()


@pytest.mark.parametrize("attribute, values", {
    "obs_size": ("0", "'x'", "5.0"), "num_envs": ("3",), "action_shape": ("4", "(1,)", "(1, 4, 2)", "(0, 4)"),
    "obs_scale": ("[1.0]",), "phi_scale": ("np.ones(403)",), "truth_xy": ("None", "np.zeros((3, 2))"),
    "obs": ("[0, 0]", "np.zeros((2, 1), int)", "np.zeros(7, int)", "np.zeros(2)", "np.array(['a', 'b'])",
            "np.array([0, 403])"),
    "truth_obs": ("np.arange(404)",), "start_index": ("403", "-1"), "num_cells": ("-1", "5.0", "0"),
    "cell": ("lambda obs: obs + 403", "lambda obs: obs * 1.0", "None"),
    "fallen": ("lambda: False", "lambda: np.zeros(2)"),
    "move, place": ("None", "lambda actions: None", "lambda actions: 1 / 0",
                    "lambda actions: np.zeros(5, int)"),
    "distance": ("[[0]]", "np.zeros((3, 3))", "0 * env.distance", "env.distance + np.nan", "np.inf"),
    "get_state, set_state": ("lambda: {}",)}.items())
def test_own_environments_that_break_the_contract_are_refused_by_name(tmp_path, attribute, values):
    for value in values:
        own = write(tmp_path, "import numpy as np\nimport gridworld\n\n\ndef make(num_envs, seed):\n"
                    "    env = gridworld.GridWorldVec('4rooms', num_envs, seed)\n"
                    f"    env.{attribute.split(',')[0]} = {value}\n    return env\n", "own.py")
        with pytest.raises(UsageError, match=f"make: {attribute} is missing or not as README"):
            antmaze.make_env(f"{own}:make", 2, 0)


def test_pictures_of_every_environment(tmp_path, monkeypatch):
    path = write(tmp_path, "S.G\n.#.\n")
    grid, ant = GRID(path), ANT(path, 1)
    Path(path).unlink()  # no picture may need it again
    first, second = Figure().subplots(1, 2)
    grid.draw(first, np.arange(5.0))
    ant.draw(second, np.arange(len(ant.truth_xy)))
    assert first.images[0].get_array().tolist() == [[0, 1, 2], [3, None, 4]]  # the wall is masked
    assert [line.get_xydata().tolist() for line in first.lines] == [[[3, 2]], [[1, 2]]]  # goal, s0
    assert np.array_equal(second.images[0].get_array(), ~ant.free)
    assert second.images[0].get_extent() == [-2, 10, -6, 2]
    assert np.array_equal(second.collections[-1].get_offsets(), ant.truth_xy)
    assert np.array_equal(second.collections[-1].get_array(), range(len(ant.truth_xy)))
    rows = [{"update": i, "env_steps": 100 * i, "eval/extent": i, "loss/attract": -i} for i in range(3)]
    gridworld.draw_curves(tmp_path / "curves.png", {"one": [rows, rows[:2]], "two": [rows]})
    gridworld.draw_representation(tmp_path / "representation.png", grid, grid.truth_xy[:, :1], "score")
    for env, shape in ((grid, (1, 4)), (ant, (8, 5))):
        policy = lambda obs, skill: np.full((len(obs), *shape), 1 / shape[1])  # noqa: B023, E731
        env.draw_skills(tmp_path / f"{env.name}.png", policy, np.eye(3, 2), 3)
    monkeypatch.chdir(tmp_path)
    assert shell("antmaze.py") == (0, (
        "antmaze1: 13 free blocks, 208 cells, 153 positional states, goal 43.2 away, furthest cell 45.4\n"
        "picture: antmaze.png\n"), "")
    assert len(files(tmp_path, "*.png")) == len(files(tmp_path)) == 5


# ------------------------------------------------------------------------------------------------------- TATC
def small_setup(tmp_path, **values):
    """(args, env, networks, omega) of six agents."""
    args = small(TATC, tmp_path, **values)
    env, _ = tatc.prepare(args)
    torch.manual_seed(0)
    return args, env, tatc.make_networks(args, env), tatc.make_directions(args)


def descend(loss, *modules, limit=math.inf):
    """One step of size 0.1 against the gradient, whose norm is clipped to the limit."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
    norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
    for parameter, gradient in zip(parameters, gradients):
        parameter.data -= 0.1 * gradient * min(1.0, limit / norm)


def naive_update_policy(args, level, policy, critic, omega, obs, skill, actions, rewards, ends, rng):
    """A2C or PPO by loops on the first ends[n] steps of trajectory n; returns how many ratios it clipped."""
    ppo, low, steps, clipped = args.policy_update == "ppo", level == "low", obs.shape[1], 0
    decay = args.gae_lambda if low else 1.0

    def outputs(n, t):
        log_pi = policy(obs[n, t], omega[skill[n]]).reshape(actions.shape[2], -1).log_softmax(-1)
        log_prob = sum(log_pi[head, action] for head, action in enumerate(actions[n, t]))
        value = critic(obs[n, t], torch.cat([omega[skill[n]], torch.tensor([1 - t / steps])]))[0]
        return log_prob, -(log_pi.exp() * log_pi).sum(), value

    places = [(n, t) for n in range(len(obs)) for t in range(ends[n])]
    before = {place: [output.detach() for output in outputs(*place)] for place in places}
    advantage = {}
    for n, t in places:
        errors = [rewards[n][k] - before[n, k][2] + (before[n, k + 1][2] if k + 1 < ends[n] else 0.0)
                  for k in range(t, ends[n])]
        advantage[n, t] = sum(decay**k * error for k, error in enumerate(errors))
    returns = {place: advantage[place] + before[place][2] for place in places}
    if args.norm_adv:
        every = torch.stack(list(advantage.values()))
        advantage = {place: (value - every.mean()) / every.std() for place, value in advantage.items()}
    for _ in range(args.update_epochs if low or not ppo else 8):
        if ppo and low:
            places = [places[i] for i in rng.permutation(len(places))]
        for batch in np.array_split(places, 8 if ppo and low else 1):
            loss = 0.0
            for place in map(tuple, batch.tolist()):
                log_prob, entropy, value = outputs(*place)
                ratio = (log_prob - before[place][0]).exp()
                gain = min(ratio * advantage[place], ratio.clamp(0.8, 1.2) * advantage[place])
                clipped += not 0.8 <= ratio <= 1.2
                loss += -gain - getattr(args, f"{level}_entropy_coef") * entropy
                loss += (0.5 if ppo else 1.0) * (value - returns[place]) ** 2
            descend(loss / len(batch), policy, critic, limit=0.5 if ppo else math.inf)
    return clipped


@pytest.mark.parametrize("values, walkers, complete", [
    (dict(), 2, True), (dict(update_epochs=3, pair_gap=2, boredom="sum"), 0, True), (dict(), 6, True),
    (ANT_TATC | dict(skills_per_update=2, boredom="mean"), 2, True), (ANT_TATC, 6, True),
    (ANT_TATC | dict(pair_gap=4, gae_lambda=0.0, boredom="squared_sum"), 0, False),
], ids=["grid", "grid, nobody walks", "grid, all walk", "ant", "ant, all walk", "ant, nobody walks"])
def test_one_update_against_naive_loops(tmp_path, values, walkers, complete):
    """Eq. 2 to 6, A2C and PPO: every parameter after every gradient step, with a memory of two rollouts."""
    args, env, *parts = small_setup(tmp_path, **values)
    networks, omega = (part.double() for part in parts)  # a small step's direction is lost in float32
    rng, recent, fall_cost = np.random.default_rng(3), [], 0.0
    for _ in range(2):
        batch = tatc.rollout(args, env, networks, omega, np.arange(6) < walkers, rng)
        obs, actions, skill, fallen = (part.flatten(0, 1) for part in batch)
        recent.append((obs[:, ::args.pair_gap], skill == 8))
    if args.policy_update == "ppo":  # D10: ant 5 falls in step 6 and rolls over, ant 4 lies on its back
        fallen[5, 7:11] = fallen[4] = True
        fall_cost = 2.0
    naive, again = copy.deepcopy((networks, rng))
    optimizers = {name: torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
                  for name, optimizer in tatc.make_optimizers(args, networks).items()}
    episode = batch[0][:, :, 0].transpose(0, 1), batch[0][-1, :, -1], batch[2].T
    info = tatc.update(args, networks, optimizers, omega, batch, episode if complete else None, recent, rng,
                       fall_cost)

    phi, expected, clipped = naive["phi"], {}, 0
    mine = (skill < 8).nonzero().flatten().tolist()
    if mine:
        # State by state: in one batch the same state may differ in its last digits, and move.
        steps = {n: torch.stack([phi(s) for s in obs[n]]).detach().diff(dim=0) for n in mine}
        floor = args.step_floor * torch.stack([steps[n].norm(dim=1) for n in mine]).mean()
        rewards = [[float(step @ omega[skill[n]] / (step.norm() + floor)) if step.any() else 0.0
                    for step in steps[n]] for n in mine]
        expected["rollout/skill_reward"] = np.mean(rewards)
        ends = [args.skill_length] * len(mine)
        for i, n in enumerate(mine):
            if fall_cost and fallen[n].any():
                ends[i] = fallen[n].tolist().index(True)
                rewards[i][ends[i] - 1] = -fall_cost
        clipped = naive_update_policy(args, "low", naive["pi_low"], naive["v_low"], omega, obs[mine, :-1],
                                      skill[mine], actions[mine], rewards, ends, again)
    if mine and complete:
        began, final, chosen = (part[walkers:] for part in episode)
        far = [(phi(a[0]) - phi(b)).norm().item() for a, b in zip(began, final)]
        expected["rollout/high_return"] = np.mean(far)
        length = chosen.shape[1]
        naive_update_policy(
            args, "high", naive["pi_hi"], naive["v_hi"], omega[:1, :0], began, [0] * len(far),
            chosen[..., None], [[0.0] * (length - 1) + [value] for value in far], [length] * len(far), again)
    walks, skills = ([path for paths, walk in recent for path in paths[walk == which]]
                     for which in (True, False))
    loss = torch.zeros(())
    if walks:
        states = [state for walk in walks for state in walk[:-1]]
        expected["loss/attract"] = torch.stack([
            (phi(s) - phi(n)).square().sum() for walk in walks for s, n in zip(walk[:-1], walk[1:])]).mean()
        pairs = again.integers(len(states), size=(2, len(states))).T
        expected["loss/repel"] = torch.stack([
            torch.exp(-(phi(states[x]) - phi(states[y])).norm()) for x, y in pairs]).mean()
        loss = expected["loss/attract"] + args.beta * expected["loss/repel"]
    if skills:
        power = 2 if "squared" in args.boredom else 1
        count = len(skills) * (len(skills[0]) - 1 if "mean" in args.boredom else 1)
        expected["loss/boredom"] = sum((phi(s) - phi(n)).norm() ** power / count for path in skills
                                       for s, n in zip(path[:-1], path[1:]))
        loss = loss + args.boredom_coef * expected["loss/boredom"]
    descend(loss, phi)
    for name, parameter in networks.named_parameters():
        torch.testing.assert_close(parameter, naive.get_parameter(name), rtol=0, atol=1e-6, msg=name)
    assert {key: value.item() for key, value in expected.items()} == pytest.approx(
        {key: value.item() for key, value in info.items()
         if key.startswith("rollout") or key[5:] in ("attract", "repel", "boredom")}, rel=1e-4)
    assert clipped > 0 or args.policy_update == "a2c" or not mine


@pytest.mark.parametrize("values", [
    dict(), dict(env="antmaze1", skill_length=10, episode_length=20, skills_per_update=2),
], ids=["grid", "ant"])
def test_rollouts_follow_the_policies_and_the_maze(tmp_path, values):
    """Probabilities against torch's own layers on one-hot or scaled inputs; what is drawn follows them."""
    args, env, networks, omega = small_setup(tmp_path, num_envs=2000, **values)
    low, high = networks["pi_low"], networks["pi_hi"]
    with torch.no_grad():  # far from uniform, and another for every state and skill
        for net, name in itertools.product((low, high), ("weight_obs", "weight_extra", "out.weight")):
            net.get_parameter(name).mul_(8)
    walkers = np.arange(2000) < 1000
    env.place(walkers | ~walkers, "uniform")
    obs, actions, skill, _ = tatc.rollout(args, env, networks, omega, walkers, np.random.default_rng(0))
    assert torch.equal(obs[1:, :, 0], obs[:-1, :, -1]) and np.array_equal(env.obs, obs[-1, :, -1])
    if env.obs_scale is None:
        assert np.array_equal(obs[:, :, 1:], env.next_state[obs[:, :, :-1], actions[..., 0]])
    layers = nn.Sequential(nn.Linear(env.obs_size + 2, 16), nn.Tanh(), low.middle, nn.Tanh(), low.out)
    layers[0].load_state_dict({"weight": torch.cat([low.weight_obs, low.weight_extra]).T, "bias": low.bias})
    seen, chosen = obs[:, 1000:, :-1], skill[:, 1000:, None].expand(-1, -1, args.skill_length)
    scaled = torch.eye(38)[seen] if env.obs_scale is None else seen * torch.as_tensor(env.obs_scale)
    pi_low = layers(torch.cat([scaled, omega[chosen]], dim=-1)).unflatten(-1, env.action_shape).softmax(-1)
    found = tatc.skill_policy(low, omega, env.action_shape, seen, chosen)
    assert np.allclose(found, pi_low.detach(), atol=1e-5) and (skill[:, :1000] == 8).all()
    for pi, drawn in ((pi_low, actions[:, 1000:]), (high(seen[:, :, 0]).softmax(-1), chosen[..., 0]),
                      (torch.full((1, env.action_shape[1]), 1 / env.action_shape[1]), actions[:, :1000])):
        surplus = nn.functional.one_hot(drawn, pi.shape[-1]) - pi
        assert surplus.flatten(0, -2).mean(0).abs().max() < 0.04  # as often as they should be,
        assert (surplus * pi).sum(-1).mean().abs() < 0.04  # and where they should be


def test_episodes_start_as_the_prior_says(tmp_path):
    args = small(TATC, tmp_path, num_envs=20000, reset_prob=0.3, random_walk_prob=0.4)
    env, rng, every = GRID(args.env, 20000, 0), np.random.default_rng(0), np.ones(20000, dtype=bool)
    env.place(every, env.goal_index)
    walks = tatc.start_episodes(args, env, rng)
    assert abs(walks.mean() - 0.4) < 0.015 and abs((env.obs == env.start_index).mean() - 0.3) < 0.015
    assert abs((env.obs[walks] == env.start_index).mean() - 0.3) < 0.02  # one draw does not decide the other
    assert np.isin(env.obs, (env.goal_index, env.start_index)).all()
    args.prior = "uniform"
    tatc.start_episodes(args, env, rng)
    assert np.abs(np.bincount(env.obs) / 20000 - 1 / env.num_states).max() < 0.015
    args, env = TATC(env="antmaze1", num_envs=6, reset_prob=0.0, random_walk_prob=0.3), ANT("antmaze1", 6)
    state = env.truth_obs[[env.goal_index] * 6].copy()
    state[:2, 3:7] = 0, 1, 0, 0  # upside down: these start at s0 (D7)
    env.place(every[:6], state)
    tatc.start_episodes(args, env, rng)
    assert np.abs(env.obs[:2, :2]).max() < 0.2 and not env.fallen().any()
    assert np.allclose(env.obs[2:], state[2:])


# --------------------------------------------------------------------------------------- runs and their files
def interrupted(args, calls, how):
    """Exit code of a training in a process of its own that gets the signal `how` in its calls-th update."""
    owner, name = (evaluate.Sac, "step") if isinstance(args, SHAPING) else (gridworld, "add_to_sums")

    def body():
        original, count = getattr(owner, name), itertools.count(1)

        def counted(*given):
            original(*given)
            if next(count) == calls:
                os.kill(os.getpid(), how)
        setattr(owner, name, counted)
        gridworld.guarded(lambda: trained(args))
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("kind, values, stops", [  # in the middle of episodes, log intervals, DCO's stages
    (TATC, dict(), (5, 10)), (TATC, dict(skills_per_update=1), (5, 10)),
    (TATC, dict(env="antmaze2", skill_length=10, episode_length=20, phi_memory=4, pair_gap=5), (5, 10)),
    (LAP, dict(data="online", prior="s0"), (27, 50)),
    (LAP, dict(data="offline", objective="allo", reachability=True), (27, 50)),
    (LAP, dict(env="antmaze1", data="online", prior="s0", samples=60, episode_length=10, dim=3, pair_gap=5,
               num_envs=3, log_every=4, updates=12, checkpoint_every=5), (7, 10)),
    (DCO, dict(), (5, 17, 20, 33)), (DCO, ANT_DCO, (2, 7, 8, 13)), (DIAYN, dict(), (16, 24)),
    (DIAYN, dict(env="antmaze2", episode_length=5, discriminator="xy"), (16, 24)),
    (SHAPING, dict(), (25, 70)),
], ids=["tatc", "tatc-text", "tatc-ant", "laprep-online", "laprep-offline", "laprep-ant", "dco", "dco-ant",
        "diayn", "diayn-ant", "shaping"])
def test_interrupted_runs_continue_bit_for_bit(tmp_path, no_pictures, kind, values, stops):
    """After Ctrl-C or SIGTERM the loop saves and ends; SIGKILL loses what came after the last checkpoint."""
    def arguments(name, **more):
        often = ({"results_dir": str(tmp_path / name)} if kind is SHAPING
                 else {"checkpoint_every": {TATC: 4, LAP: 20, DCO: 3, DIAYN: 11}[kind]})
        return small(kind, tmp_path, name, **often | values | more)
    parts, whole, kept = arguments("parts", resume=True), arguments("whole"), 0
    for number, how in zip(stops, (signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
        killed = how == signal.SIGKILL
        assert interrupted(parts, number - kept, how) == (-how if killed else 130)
        kept = checkpoint(parts.run_dir)["update"]
        assert 0 < kept < number if killed else kept == number
    assert not (tmp_path / "parts/phi.npz").exists()
    content = trained(whole)
    for _ in range(2):  # and finished, it stays as it is
        assert_same_tree(content, trained(parts))
        assert metrics(whole.run_dir) == metrics(parts.run_dir)
    trained(arguments("other", seed=1))
    assert metrics(tmp_path / "other") != metrics(whole.run_dir)


@pytest.mark.parametrize("command, variant, values", [
    ("tatc.py --env umaze", "default", dict(updates=7000, low_entropy_coef=0.1, policy_update="a2c")),
    ("tatc.py --env tmaze", "default", dict(episode_length=40, skill_length=20, low_entropy_coef=1.0)),
    ("tatc.py --env antmaze1", "default", dict(policy_update="ppo", pair_gap=10, fall_cost=20.0, anneal=0.5)),
    ("tatc.py --env antmaze2 --policy-update a2c", "policy_update=a2c", dict(gae_lambda=1.0, fall_cost=0.0)),
    ("laprep.py --env antmaze1 --seed 9 --run-dir x", "default", dict(data="offline", episode_length=500)),
    ("laprep.py --prior uniform --objective allo", "prior=uniform,objective=allo",
     dict(beta=1.0, episode_length=50, reset_prob=0.3)),
    ("baselines_dco_diayn.py dco --env 4rooms --percentile 20 --hidden 9 8", "percentile=20,hidden=(9,8)",
     dict(f_updates=3000, tau=0.01, skill_length=100)),
    ("baselines_dco_diayn.py diayn --discriminator xy", "discriminator=xy", dict(hidden=(300, 300))),
    ("baselines_dco_diayn.py diayn --alpha 1", "alpha=1", dict(updates=47_000, episode_length=1000))])
def test_a_runs_name_is_what_differs_from_the_defaults(command, variant, values):
    args = parsed(command)
    assert sys.modules[type(args).__module__].prepare(args)[1] == variant
    assert {name: getattr(args, name) for name in values} == values


def test_every_changed_argument_is_in_a_runs_name():
    lengths = dict(episode_length=60, skill_length=10, pair_gap=5, skills_per_update=1)
    words = dict(prior="uniform", boredom="sum", policy_update="ppo", norm_adv=True)
    for field in dataclasses.fields(TATC):
        if field.name not in (*gridworld.FREE, "env", "seed"):
            value = (lengths | words).get(field.name, 0.123 if "float" in str(field.type) else 3)
            assert f"{field.name}={value}" in tatc.prepare(TATC(env="umaze", **{field.name: value}))[1]


def test_a_second_process_in_a_run_directory_is_refused(tmp_path):
    run = tmp_path / "run"
    command = (f"tatc.py --env '{write(tmp_path, CORRIDOR)}' --num-envs 4 --updates 100000 "
               f"--checkpoint-every 4 --resume --run-dir '{run}'")
    first = subprocess.Popen([sys.executable, *shlex.split(f"{ROOT}/{command}")], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)
    try:
        while not (run / "checkpoint.pt").exists():
            time.sleep(0.1)
            assert first.poll() is None
        code, _, err = shell(command)
    finally:
        first.send_signal(signal.SIGTERM)
        last = first.communicate(timeout=60)[1].splitlines()[-1]
    assert first.returncode == 130 and last.startswith("tatc.py: interrupted")
    assert code == 2 and err.count("\n") == 1 and f"in use by process {first.pid}" in err
    assert not list(run.glob("*.tmp")) and checkpoint(run)["update"] > 0


def test_a_full_disk_is_said_in_one_line_and_resume_goes_on(tmp_path):
    """A limit of 100 kB per file ends the write of a checkpoint of 300 as a full disk does."""
    command = (f"tatc.py --env '{write(tmp_path, CORRIDOR)}' --updates 6 --hidden 64 "
               f"--checkpoint-every 2 --resume --run-dir '{tmp_path}/run'")
    full = subprocess.run(["bash", "-c", f"ulimit -f 100; exec {sys.executable} {ROOT}/{command}"],
                          capture_output=True, text=True)
    assert full.returncode == 2 and "File too large" in full.stderr.splitlines()[-1]
    assert "Traceback" not in full.stderr and not list((tmp_path / "run").glob("*.tmp"))
    cli(command)
    assert checkpoint(tmp_path / "run")["update"] == 6


def test_flipped_bits_and_foreign_checkpoints_are_refused(tmp_path, no_pictures):
    args, rng, caught = small(TATC, tmp_path, hidden=128, resume=True), np.random.default_rng(0), 0
    content, path = trained(args), tmp_path / "run/checkpoint.pt"
    before, good = files(tmp_path), path.read_bytes()
    for position in rng.integers(len(good), size=100):
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            loaded = gridworld.load_checkpoint(path.parent, ("tatc",))
        except UsageError as error:
            caught += 1
            assert "\n" not in str(error) and "checkpoint.pt" in str(error)
        else:  # a bit between the records: nothing may have changed
            assert_same_tree(content, loaded)
    assert caught >= 90
    bad = content["networks"] | {"phi.bias": torch.full((128,), math.nan)}
    for new, message in (
            (good[:len(good) // 2], "damaged"), (b"import os; os.system('true')", "damaged or not a che"),
            ({"script": "laprep"}, "not a checkpoint of tatc"), ({"args": None}, "another version"),
            ({"networks": {}}, "does not fit"), ({"rng": None}, "does not fit"),
            ({"networks": bad}, "not finite"), ({"networks": []}, "another version"),
            ({"networks": {"phi.bias": 3}}, "another version"), ({"variant": 7}, "another version"),
            ({"update": -5}, "another version"), ({"update": "3"}, "another version"),
            ({"args": content["args"] | {"env": None}}, "another version"), ({"rows": 5}, "does not fit"),
            ({"visits": torch.zeros(3)}, "does not fit"), ({"random_walk": None}, "does not fit")):
        path.write_bytes(new) if isinstance(new, bytes) else torch.save(content | new, path)
        with pytest.raises(UsageError, match=message):
            trained(args)
    for values in ({"hidden": "x"}, {"hidden": -1}, {"dim": None}, {"num_directions": 3.5}, {"hidden": 0}):
        torch.save(content | {"args": content["args"] | values}, path)
        with pytest.raises(UsageError):
            tatc.load(path)
    for rows, command in itertools.product(([], 5, [{"x": 1.0}]), ("scores", "curves")):
        torch.save(content | {"rows": rows}, path)
        with pytest.raises(UsageError, match="holds no logged rows"):
            cli(f"evaluate.py {command} --runs {{run}}", run=path.parent)
    assert files(tmp_path) | {path: good} == before


@pytest.mark.parametrize("kind, other, message", [
    (TATC, dict(beta=0.5), "beta 0.2 there, 0.5 here"), (LAP, dict(dim=3), "dim 2 there, 3 here"),
    (DIAYN, dict(num_skills=4), "num_skills 3 there, 4 here")])
def test_a_run_goes_on_with_more_updates_and_never_as_another(tmp_path, no_pictures, kind, other, message):
    updates = trained(small(kind, tmp_path))["update"] + 1
    assert trained(small(kind, tmp_path, updates=updates, resume=True))["update"] == updates
    path = tmp_path / "run/checkpoint.pt"
    kept = path.read_bytes()
    for wanted, values, message in (
            (kind, {}, r"holds a run already \(checkpoint"), (kind, other | dict(resume=True), message),
            (kind, dict(resume=True), f"has {updates} updates already"),
            (kind, dict(resume=True, seed=3, updates=updates), "seed 0 there, 3 here"),
            (DCO, dict(resume=True), "not a checkpoint of dco")):
        with pytest.raises(UsageError, match=message):
            trained(small(wanted, tmp_path, **values))
    args = small(kind, tmp_path, resume=True)
    Path(args.env).write_text("S..\n...\n")  # another maze under the same name
    with pytest.raises(UsageError, match="env 'maze-[0-9a-f]{6}' there, 'maze-[0-9a-f]{6}' here"):
        trained(args)
    with pytest.raises(UsageError, match="was trained on maze-[0-9a-f]{6}, and .* is maze-[0-9a-f]{6} now"):
        sys.modules[kind.__module__].load(path)
    assert path.read_bytes() == kept


def test_divergence_stops_a_run_with_one_line_and_keeps_its_checkpoint(tmp_path, monkeypatch):
    reward, calls = tatc.skill_reward, itertools.count(1)
    monkeypatch.setattr(tatc, "skill_reward", lambda *given: reward(*given) / (next(calls) < 4))
    with pytest.raises(UsageError, match="^update 4: .* is (nan|inf|-inf); the last checkpoint is intact"):
        trained(small(TATC, tmp_path, checkpoint_every=1))
    kept = gridworld.load_checkpoint(tmp_path / "run", ("tatc",))  # refuses weights that are not finite
    assert kept["update"] == 3


def test_tensorboard_is_optional(tmp_path, no_pictures):
    absent, refused = not importlib.util.find_spec("tensorboard"), "needs the package tensorboard"
    with pytest.raises(UsageError, match=refused) if absent else contextlib.nullcontext():
        trained(small(TATC, tmp_path, tensorboard=True))
    assert absent or list((tmp_path / "run").glob("events.out.*"))


SMALL_LAP = dict(dim=3, updates=700, batch_size=256, samples=20_000, hidden=64, log_every=700, discount=0.5,
                 data="offline", learning_rate=2e-3, beta=2.5)  # above the eigenvalues of so small a maze


@pytest.mark.parametrize("kind, values, least", [
    (TATC, dict(updates=400, num_envs=16, hidden=128, log_every=200),
     dict(spearman_s0=0.9, spearman_all=0.9, coverage=1, far=0.05)),
    (LAP, SMALL_LAP, dict(subspace=0.98, fiedler_r2=0.98)),
    (LAP, SMALL_LAP | dict(objective="allo"), dict(subspace=0.98, fiedler_r2=0.98, cosine=0.97)),
    (DIAYN, dict(env="4rooms", num_skills=4, updates=600, num_envs=32, hidden=(64, 64), batch_size=128,
                 learning_rate=1e-3, buffer_size=20_000, episode_length=60, learning_starts=500,
                 log_every=120), dict(accuracy=0.8)),
], ids=["tatc", "laprep", "allo", "diayn"])
def test_scripts_learn_small_mazes_in_seconds(tmp_path, no_pictures, kind, values, least):
    rows = trained(small(kind, tmp_path, **values))["rows"]
    found = {name: rows[-1][f"eval/{name}"] for name in least}
    assert all(found[name] >= least[name] for name in least), found
    assert kind is not DIAYN or rows[0]["eval/accuracy"] < 0.4  # which cannot tell skills apart at first


# ---------------------------------------------------------------------------------------------------- Lap-rep
def test_losses_against_loops():
    phi_u, phi_v = torch.randn(2, 7, 4, dtype=torch.float64, generator=torch.manual_seed(0))

    def eq1(u, v, beta):
        attract = sum((a - b) @ (a - b) for a, b in zip(u, v)) / 7
        repel = sum((x @ y) ** 2 - x @ x - y @ y for x, y in itertools.permutations(u, 2)) / 42
        return attract + beta * repel
    exactly(laprep.graph_drawing_loss(phi_u, phi_v, 0.7)[0], eq1(phi_u, phi_v, 0.7))
    # Wu asks for I / d with weight 5: d times that loss at phi / sqrt(d) is Eq. 1 with beta 5 / d, plus 5.
    norm = (phi_u / 2).square().sum(-1).mean()
    wu = eq1(phi_u / 2, phi_v / 2, 5) + 5 * (2 * norm - 2 * norm / 4 + 1 / 4)
    exactly(4 * wu, laprep.graph_drawing_loss(phi_u, phi_v, 5 / 4)[0] + 5)
    phi_u[:, 0] = phi_v[:, 0] = 1  # DCO's loss is Eq. 1 with phi = (1, f)
    loss, _ = baselines.fiedler_loss(phi_u[:, 1], phi_v[:, 1], 0.7)
    exactly(loss, eq1(phi_u[:, :2], phi_v[:, :2], 0.7) + 0.7 * 2)


@pytest.mark.parametrize("objective", laprep.OBJECTIVES)
def test_laprep_objectives_are_stationary_at_the_exact_eigenvectors(tmp_path, objective):
    """Eq. 1 at variances 1 - lambda / beta, in any rotation; allo at variance 1 and duals -4 lambda."""
    env, beta = GRID(write(tmp_path, CORRIDOR)), 0.5
    values, vectors = map(torch.as_tensor, env.laplacian_eigenvectors(4))
    # All transitions, 100 times: the pairs x != y are then almost all pairs.
    u, v = np.tile(env.truth_obs.repeat(4), 100), np.tile(env.next_state.ravel(), 100)

    def gradient(variance, rotation):
        phi = ((env.num_states * variance).sqrt() * vectors @ rotation).requires_grad_()
        loss = laprep.graph_drawing_loss(phi[u], phi[v], beta)[0]
        if objective == "allo":
            loss, _, error = laprep.augmented_lagrangian_loss(phi[u], phi[v], torch.diag(-4 * values), beta)
            exactly(error, (phi.T @ phi / env.num_states - torch.eye(4)).tril().detach())
        return torch.autograd.grad(loss, phi)[0].abs().max()
    one, less, identity = values**0, 1 - values / beta, torch.eye(4, dtype=torch.float64)
    right, wrong, near = (one, less, 1e-12) if objective == "allo" else (less, one, 1e-4)
    turn = torch.linalg.qr(torch.arange(16.0).sin().reshape(4, 4).double())[0]
    assert gradient(right, identity) < near and gradient(wrong, turn) > 2e-3
    assert (gradient(right, turn) < near) == (objective == "graph_drawing")


def test_pairs_follow_the_truncated_geometric_gap_in_both_copies_of_the_sampler():
    assert inspect.getsource(laprep.sample_pairs) == inspect.getsource(baselines.sample_pairs)
    data = np.arange(5 * 11).reshape(5, 11)  # episode e, step t is 11 e + t
    u, v = laprep.sample_pairs(data, 200_000, 0.9, np.random.default_rng(0))
    assert (u // 11 == v // 11).all() and (v > u).all() and set(u % 11) == set(range(10))
    for step in (0, 6):
        gap = (v - u)[u % 11 == step]
        expected = 0.9 ** np.arange(10 - step) * 0.1 / (1 - 0.9 ** (10 - step))
        assert np.abs(np.bincount(gap, minlength=11)[1:11 - step] / len(gap) - expected).max() < 0.012
    u, v = laprep.sample_pairs(data, 1000, 0.0, np.random.default_rng(0))
    assert (v - u == 1).all()


def test_laprep_rollouts_of_both_priors(tmp_path):
    def rollouts(**values):
        args = small(LAP, tmp_path, env="umaze", num_envs=2000, **values)
        env, rng = laprep.prepare(args)[0], np.random.default_rng(0)
        return env, *laprep.rollout(args, env, rng), laprep.rollout(args, env, rng)[0]
    env, first, cells, second = rollouts(prior="s0")
    assert first.shape == (2000, 91) and np.array_equal(cells, first[:, 1:].T.ravel())
    kept = second[:, 0] == first[:, -1]
    assert (kept | (second[:, 0] == env.start_index)).all() and abs((~kept).mean() - 0.3) < 0.035
    assert env.distance[first[:, :-1], first[:, 1:]].max() == 1
    _, walks, cells, _ = rollouts()
    assert walks.shape == (2000, 51) and len(np.unique(walks[:, 0])) > 0.95 * env.num_states
    _, apart, same_cells, _ = rollouts(pair_gap=5)
    assert np.array_equal(apart, walks[:, ::5]) and np.array_equal(same_cells, cells)
    ants, args = ANT("antmaze1", 2), LAP(env="antmaze1", num_envs=2, reset_prob=0.0)
    laprep.resolve(args, ants)
    states = ants.truth_obs[[ants.goal_index] * 2].copy()
    states[0, 3:7] = 0, 1, 0, 0  # on its back: it goes to s0, as TATC's do (D7)
    ants.place(np.ones(2, dtype=bool), states)
    start = laprep.rollout(args, ants, np.random.default_rng(0))[0][:, 0, :2]
    assert np.abs(start[0]).max() < 0.2 and np.allclose(start[1], ants.goal_xy, atol=0.1)


def test_scores_of_exact_rotated_and_wrong_eigenvectors(tmp_path):
    def scores(phi):  # cosine, subspace, fiedler_r2
        return pytest.approx(list(laprep.eigenvector_scores(phi, values, vectors).values()), abs=1e-9)
    half = np.array([[1, 1], [-1, 1]]) / np.sqrt(2)
    for name, near in (("antmaze1", 0.05), ("tmaze", 1e-9)):
        env = antmaze.make_env(name, 1, 0)
        values, vectors = env.laplacian_eigenvectors(12)
        assert baselines.fiedler_cosine(5 - 3 * vectors[:, 1], values, vectors) == pytest.approx(1, abs=1e-9)
        assert baselines.fiedler_cosine(vectors[:, 2], values, vectors) < near
        basis = np.linalg.qr(vectors)[0]  # the ants' vectors are of a sample of the graph's nodes
        assert scores(-2 * basis[:, :4]) == [1, 1, 1]
        assert scores(np.hstack([basis[:, :2], basis[:, 2:4] @ half])) == [(2 + np.sqrt(2)) / 4, 1, 1]
        assert scores(basis[:, [0, 1, 2, 4]]) == [0.75, 0, 1]
    assert scores(vectors[:, [0, 2, 3, 4]]) == [0.25, 0, 0]
    # A square room: eigenvectors 2 and 3 share their eigenvalue, so any rotation is right; d = 2 cuts it.
    room = GRID(write(tmp_path, "S....\n" + 4 * ".....\n"))
    values, vectors = room.laplacian_eigenvectors(10)
    turned = np.hstack([vectors[:, :1], vectors[:, 1:3] @ half])
    assert scores(turned) == [1, 1, 1] and scores(turned[:, :2]) == [1, 1, 0.5]
    assert scores(turned[:, 1:]) == [0.5, 0, 1]  # lacks the constant


def test_laprep_reachability_distances_are_the_resistances_of_the_graph(tmp_path):
    """With all d = S exact eigenvectors: sum_i (v_i(s) - v_i(t))^2 / lambda_i, by the pseudo-inverse of L."""
    env = GRID(write(tmp_path, SMALL_MAZE))
    values, vectors = map(torch.as_tensor, env.laplacian_eigenvectors(8))
    plain, scaled = (laprep.representation(LAP(reachability=flag), vectors.__getitem__,
                                           torch.diag(-4 * values), env.truth_obs) for flag in (False, True))
    inverse = np.linalg.pinv(np.eye(8) - env.transition_matrix(np.full((8, 4), 0.25)))
    resistance = inverse.diagonal()[:, None] + inverse.diagonal() - 2 * inverse
    assert np.array_equal(plain, vectors) and scaled.shape == (8, 7) and resistance.max() > 1
    assert np.allclose(np.square(scaled[:, None] - scaled).sum(-1), resistance, rtol=0, atol=1e-9)


# -------------------------------------------------------------------------------------------------- baselines
def doubled(module):
    """A copy with other weights, for targets that differ from their networks."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data *= 2
    return module


def assert_updated(networks, targets, expected, old_targets):
    """The networks are the expected ones, the targets a quarter of the way from the old ones to them."""
    fast, slow = dict(expected.state_dict()), old_targets.state_dict()
    moved = {key: 0.75 * value + 0.25 * fast[key] for key, value in slow.items()}
    for mine, theirs in ((networks, fast), (targets, moved)):
        torch.testing.assert_close(dict(mine.state_dict()), theirs, rtol=0, atol=1e-6)


def naive_sac(policy, critics, slow, both_q, soft_value, batch, noise):
    """Steps of size 0.1: the critics go towards the soft values of the slow ones, then the policy uphill."""
    obs, act, following, reward, going_on = batch
    target = reward + 0.99 * going_on * soft_value(slow, following, noise[0]).detach()
    descend(sum(((q - target) ** 2).mean() for q in both_q(critics, obs, act)), critics)
    descend(-soft_value(critics, obs, noise[1]).mean(), policy)


def test_sac_terms_against_distributions_and_loops():
    torch.manual_seed(0)
    outputs, noise = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    outputs[0, 3:] = torch.tensor([-9.0, 0.5, 9.0])  # beyond the limits of log std
    tanh = torch.distributions.TanhTransform(cache_size=1)
    normal = torch.distributions.Normal(outputs[:, :3], outputs[:, 3:].clamp(-5, 2).exp())
    expected = tanh(normal.mean + normal.stddev * noise)
    log_prob = torch.distributions.TransformedDistribution(normal, tanh).log_prob(expected).sum(-1)
    exactly(baselines.squashed_gaussian(outputs, noise), (expected, log_prob))
    logits, skill = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 7, 3, 3])
    exactly(baselines.skill_reward_diayn(logits, skill), torch.stack(
        [row[z] - row.exp().sum().log() - math.log(1 / 8) for row, z in zip(logits, skill)]))


@pytest.mark.parametrize("name", ["antmaze1", "4rooms"])
def test_one_diayn_update_against_written_out_gradients(tmp_path, name):
    args = small(DIAYN, tmp_path, env=name, tau=0.25)
    env, _ = baselines.prepare(args)
    torch.manual_seed(0)
    networks = baselines.make_diayn(args, env)
    critics = nn.ModuleDict({q: networks[q] for q in ("q1", "q2")})
    targets = doubled(critics)
    for critic in targets.values():  # each is the smaller one somewhere
        critic.layers[-1].weight.data *= 8
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1)
                  for name, part in {"policy": networks["policy"], "critics": critics}.items()}
    mine, slow = copy.deepcopy((networks, targets))
    obs, following = torch.as_tensor(env.truth_obs[:120]).unflatten(0, (2, 60))
    reward, code = torch.randn(60), torch.eye(3).repeat(20, 1)
    discrete, act, noise = False, torch.rand(60, 8) * 2 - 1, torch.randn(2, 60, 8)
    if name == "4rooms":
        discrete, act, noise = True, torch.randint(4, (60, 1)), (None, None)

    def both_q(critics, states, act):
        if discrete:
            return [critics[q](states, code)[range(60), act[:, 0]] for q in ("q1", "q2")]
        return [critics[q](states, torch.cat([code, act], -1))[:, 0] for q in ("q1", "q2")]

    def soft_value(critics, states, noise):
        outputs = mine["policy"](states, code)
        if discrete:
            pi, q = outputs.softmax(-1), torch.minimum(*(critics[q](states, code) for q in ("q1", "q2")))
            return (pi * (q - 0.1 * pi.log())).sum(-1)
        act, log_prob = baselines.squashed_gaussian(outputs, noise)
        return torch.minimum(*both_q(critics, states, act)) - 0.1 * log_prob
    naive_sac(mine["policy"], mine, slow, both_q, soft_value, (obs, act, following, reward, 1.0), noise)
    baselines.update_sac(args, networks, targets, optimizers, obs, act, following, reward, code, noise)
    assert_updated(networks, targets, mine, slow)


def test_one_shaping_update_against_written_out_gradients():
    """Critics of progress (E5): alpha is times 1 - gamma; the targets make up for two steps of 1 - tau."""
    args, env = SHAPING(hidden=8, steps=100, update_ratio=0.5, tau=1 - 0.75**0.5), ANT("antmaze1", 2)
    networks = evaluate.Sac(args, env, evaluate.make_reward("xy", env, None)).networks
    networks["targets"] = doubled(networks["targets"])
    mine = copy.deepcopy(networks)
    actor, critics, targets = (mine[name] for name in ("actor", "critics", "targets"))
    optimizers = {name: torch.optim.SGD(networks[name].parameters(), lr=0.1) for name in ("actor", "critics")}

    def layers(nets, i, x):  # of the i-th of the networks that are computed together
        for k in range(3):
            x = (x.relu() if k else x) @ nets.weights[k][i] + nets.biases[k][i, 0]
        return x

    def both_q(nets, states, act):
        return [layers(nets, i, torch.cat([states, act], -1))[:, 0] for i in range(2)]

    def soft_value(nets, states, noise):
        act, log_prob = baselines.squashed_gaussian(layers(actor, 0, states), noise)
        return torch.minimum(*both_q(nets, states, act)) - 0.1 * 0.01 * log_prob
    (obs, following), act, progress = torch.randn(2, 60, 29), torch.rand(60, 8), torch.randn(60)
    ended, state = (torch.arange(60) % 3 == 0).float(), torch.get_rng_state()
    batch, noise = (obs, act, following, progress, 1 - ended), torch.randn(2, 60, 8).flip(0)
    naive_sac(actor, critics, targets, both_q, soft_value, batch, noise)
    torch.set_rng_state(state)
    evaluate.sac_update(args, networks, optimizers, (obs, act, following, progress, ended))
    assert_updated(networks["critics"], networks["targets"], critics, targets)
    assert_updated(networks["actor"], actor, actor, actor)


def test_shaping_critics_of_progress_are_those_of_the_reward():
    """E5 by value iteration on a random chain with one state that is never left: C = (1 - gamma) Q - r."""
    rng, gamma = np.random.default_rng(0), 0.9
    following, reward = rng.integers(8, size=(8, 3)), rng.normal(size=8)
    following[7] = 7  # on its back for ever
    progress, ended = (torch.tensor(part).flatten() for part in (
        reward[following] - reward[:, None], following == 7))
    q, c = np.zeros((8, 3)), np.zeros((8, 3))
    for _ in range(400):
        q = reward[following] + gamma * q.max(1)[following]
        c = evaluate.sac_target(progress, ended.double(), torch.tensor(c.max(1)[following]).reshape(1, -1),
                                torch.zeros(24), gamma, 0.0).reshape(8, 3).numpy()
    assert np.allclose(c, (1 - gamma) * q - reward[:, None])


def test_replay_keeps_the_newest_rows_and_their_columns_together():
    replay = baselines.Replay(10, (2, 1, 2, 1))
    for start in (0, 4, 8):
        k = np.arange(start, start + 4, dtype=np.float32)
        replay.add(np.stack([k, -k], 1), k[:, None] / 2, np.stack([k + 100, k], 1), (k % 3).astype(int))
    assert replay.filled == 10 and replay.position == 2 and replay.rows.dtype == np.float32
    obs, action, next_obs, skill = replay.sample((40, 5), np.random.default_rng(0))
    k = obs[..., 0]
    assert set(k.flatten().tolist()) == set(range(2, 12)) and next_obs.shape == (40, 5, 2)
    found = obs[..., 1], action[..., 0], next_obs[..., 0], skill[..., 0]
    assert_same_tree(found, (-k, k / 2, k + 100, k % 3))


def make_option(args):
    env, _ = baselines.prepare(args)
    torch.manual_seed(0)
    return env, baselines.make_option(args, env)


def test_f_learns_from_every_nth_state(tmp_path):
    args = small(DCO, tmp_path, pair_gap=5)
    f = make_option(args)[1]["f"]
    before, walks = f.weight_obs.detach().clone(), np.tile(np.arange(21), (8, 1))
    baselines.update_f(args, f, torch.optim.SGD(f.parameters(), lr=1), walks, np.random.default_rng(0))
    assert (f.weight_obs != before).any(1).nonzero().flatten().tolist() == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("values", [dict(batch_size=5), ANT_DCO], ids=["grid", "ant"])
def test_option_data_and_one_update_against_written_out_gradients(tmp_path, values):
    args = small(DCO, tmp_path, **values | dict(tau=0.25))
    env, option = make_option(args)
    walks, actions = baselines.collect_walks(args, env, np.random.default_rng(0))
    f = option["f"](torch.as_tensor(walks)).detach().numpy()[..., 0]
    end, dataset = baselines.option_dataset(args, option["f"], walks, actions)
    step = (f[:, :-1] - f[:, 1:]).ravel()
    assert np.isclose(end, np.percentile(f, 30)) and np.allclose(dataset[2], step / step.std(), atol=1e-5)
    networks, _, optimizers = baselines.make_learner(args, env, option)
    rates = {name: optimizer.defaults["lr"] for name, optimizer in optimizers.items()}
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in networks.items()}
    mine, targets, slow = copy.deepcopy(networks), doubled(networks), doubled(networks)
    index = np.random.default_rng(3).integers(len(dataset[0]), size=5)
    obs, act, reward, following = (torch.as_tensor(part[index]) for part in dataset)
    if env.obs_scale is None:
        assert walks.shape == (200, 21) and set(walks[:, 0]) == set(range(env.num_states))  # uniform starts
        assert np.array_equal(env.next_state[dataset[0], dataset[1][:, 0]], dataset[3])
        assert rates == {"policy": 1e-3, "f": 1e-3}
        target = reward + 0.99 * slow["policy"](following).max(1).values.detach()
        descend(((mine["policy"](obs)[range(5), act[:, 0].long()] - target) ** 2).mean(), mine["policy"])
    else:
        assert set(np.unique(dataset[1])) == {-1, -0.5, 0, 0.5, 1} and np.abs(walks[:, 0, :2]).max() > 4
        assert rates == {"policy": 1e-4, "critic": 1e-3, "f": 1e-3}
        target = reward + 0.99 * slow["critic"](following, slow["policy"](following).tanh())[:, 0].detach()
        descend(((mine["critic"](obs, act)[:, 0] - target) ** 2).mean(), mine["critic"])
        descend(-mine["critic"](obs, mine["policy"](obs).tanh()).mean(), mine["policy"])
    baselines.update_option(args, networks, targets, optimizers, dataset, np.random.default_rng(3))
    assert_updated(networks, targets, mine, slow)


@pytest.mark.parametrize("name", ["antmaze1", "4rooms"])
def test_skills_act_and_end_as_their_networks(tmp_path, name):
    args = small(DCO, tmp_path, **ANT_DCO | dict(env=name))
    env, option = make_option(args)
    options = nn.ModuleList([option, baselines.make_option(args, env)])
    obs, skill = torch.as_tensor(env.truth_obs[:20]), np.arange(20) % 3 % 2
    f, outputs = (torch.stack([options[z][part](obs[n:n + 1])[0].detach() for n, z in enumerate(skill)])
                  for part in ("f", "policy"))
    threshold = torch.stack([f[skill == z].mean() for z in range(2)])
    skills, expected = baselines.Skills(args, env, options, threshold), f[:, 0] <= threshold[skill]
    assert np.array_equal(skills.ended(obs, skill), expected) and 4 < expected.sum() < 16
    expected = outputs.argmax(-1) if name == "4rooms" else outputs.tanh()
    assert np.allclose(skills.act(obs, skill, None), expected, rtol=0, atol=1e-6)

    args = small(DIAYN, tmp_path, env=name, num_skills=8)
    baselines.prepare(args)
    networks = baselines.make_diayn(args, env)
    networks["policy"].layers[-1].weight.data *= 4
    skills, skill = baselines.Skills(args, env, networks), np.repeat([1, 6], 4000)
    obs = obs[:2].repeat_interleave(4000, dim=0)
    actions = skills.act(obs, skill, np.random.default_rng(0))
    outputs = networks["policy"](obs, torch.eye(8)[skill]).detach()
    if name == "4rooms":
        for part, output in zip(actions.reshape(2, -1), outputs[::4000]):
            assert np.abs(np.bincount(part) / 4000 - output.softmax(-1).numpy()).max() < 0.04
    else:
        standard = (np.arctanh(actions * (1 - 1e-6)) - outputs[:, :8].numpy()) / outputs[:, 8:].exp().numpy()
        assert np.abs(np.quantile(standard, (0.1587, 0.5, 0.8413), axis=0) - [[-1], [0], [1]]).max() < 0.06
    assert not skills.ended(obs, skill).any()


def test_dco_learns_a_corridor(tmp_path, no_pictures):
    content = trained(small(DCO, tmp_path, f_updates=150, policy_updates=250, log_every=100))
    ends = [row for row in content["rows"] if "eval/reaches" in row]
    assert [(row["rollout/option"], row["eval/reaches"]) for row in ends] == [(0, 1), (1, 1)]
    assert all(row["eval/fiedler_cosine"] >= 0.97 and 0.6 <= row["eval/initiation"] <= 0.8 for row in ends)
    _, env, skills = baselines.load(tmp_path / "run")
    traces, ended = baselines.skill_traces(skills, [0, 1], env.truth_obs)
    with np.load(tmp_path / "run/phi.npz") as file:
        assert np.array_equal(ended[..., 0], (file["phi"] <= file["threshold"]).T) and ended[..., 1].all()
    assert np.array_equal(traces[:, :, 0], [env.truth_xy] * 2) and traces.shape == (2, 38, 21, 2)
    assert np.abs(np.diff(traces, axis=2)).sum(-1).max() == 1  # and who has ended stands still:
    assert not np.diff(traces[ended[..., 0]], axis=1).any() and np.ptp(traces[:, :, -1, 0], axis=1).max() < 7
    torch.save(content | {"update": content["update"] - 1}, tmp_path / "part.pt")
    with pytest.raises(UsageError, match="holds 1 of 2 options"):
        baselines.load(tmp_path / "part.pt")


def test_diverged_ants_give_no_transition(tmp_path, monkeypatch, no_pictures):
    move, calls = ANT.move, itertools.count()

    def failing(self, actions):  # ant 1 comes far away, and then diverges
        if (call := next(calls)) == 2:
            self.place(np.arange(self.num_envs) == 1, self.truth_obs[:1])
        move(self, actions)
        self.last_diverged[1] |= call == 3
        return self.obs
    monkeypatch.setattr(ANT, "move", failing)
    rows = trained(small(DIAYN, tmp_path, env="antmaze1", updates=12, learning_starts=10**6,
                         episode_length=8, buffer_size=100))["replay"]
    assert len(rows) == 12 * 4 - 1 and rows[:, 29:37].abs().max() <= 1  # the fourth step has 3 rows
    assert torch.equal(rows[15, :29], rows[12, 37:66])  # ant 0 goes on
    assert rows[9, 37:39].abs().max() > 4 and rows[16, :2].abs().max() < 0.2  # ant 1 begins again at s0
    args, calls = small(DCO, tmp_path, **ANT_DCO), itertools.count()
    walks, actions = baselines.collect_walks(args, baselines.prepare(args)[0], np.random.default_rng(0))
    assert walks.shape == (19, 11, 29) and actions.shape == (19, 10, 8)


def test_the_discriminator_of_xy_sees_nothing_else():
    args = DIAYN(discriminator="xy")
    env, _ = baselines.prepare(args)
    obs = torch.as_tensor(env.truth_obs[:1]).requires_grad_()
    baselines.make_diayn(args, env)["discriminator"](obs).square().sum().backward()
    assert np.flatnonzero(obs.grad).tolist() == [0, 1]


# --------------------------------------------------------------------------------------------------- evaluate
def test_goal_episodes_and_their_loss_match_loops_over_single_steps():
    env, rng = GRID("4rooms"), np.random.default_rng(0)
    policy = rng.dirichlet(np.ones(4), size=env.num_states)
    state = np.append(env.distance[env.goal_index].argsort()[1:21], rng.integers(200, 400, size=20))
    again = copy.deepcopy(rng)
    visits, returns, squares, reward, last = evaluate.goal_episodes(env, policy, state, 30, 0.9, rng)
    uniform, samples = again.random((30, 40)), []
    for i in range(40):
        s, path = state[i], []
        while s != env.goal_index and len(path) < 30:
            action = int((uniform[len(path), i] > policy[s].cumsum()[:3]).sum())
            path.append((s, action))
            s = env.next_state[s, action]
        success = s == env.goal_index
        assert reward[i] == success and last[i] == s
        samples += [(s, a, success * 0.9 ** (len(path) - 1 - t)) for t, (s, a) in enumerate(path)]
    assert 0 < reward.sum() < 40
    logits = torch.tensor(rng.normal(size=(env.num_states, 4)), requires_grad=True)
    value = torch.tensor(rng.normal(size=env.num_states), requires_grad=True)
    log_pi, theirs = logits.log_softmax(-1), 0.0
    for s, a, g in samples:
        entropy = -(log_pi[s].exp() * log_pi[s]).sum()
        theirs = theirs - log_pi[s, a] * (g - value[s].detach()) - 0.3 * entropy + (g - value[s]) ** 2
    ours = evaluate.goal_task_loss(logits, value, torch.tensor(visits), torch.tensor(returns), squares, 0.3)
    exactly(ours, theirs / len(samples))
    exactly(*(torch.autograd.grad(loss, (logits, value)) for loss in (ours, theirs / len(samples))))


def test_starts_of_goal_episodes():
    env, rng, last = GRID("umaze"), np.random.default_rng(0), np.full(20000, 7)
    uniform = evaluate.start_states(env, "uniform", last, 0.3, rng)
    assert set(uniform) == set(env.truth_obs) - {env.goal_index}
    assert (evaluate.start_states(env, "s0", last, 0.3, rng) == env.start_index).all()
    prior = evaluate.start_states(env, "prior", last, 0.3, rng)
    assert set(prior) == {7, env.start_index} and abs((prior == 7).mean() - 0.7) < 0.015
    at_goal = np.full(10, env.goal_index)
    assert (evaluate.start_states(env, "prior", at_goal, 0.0, rng) == env.start_index).all()


def test_standardise():
    features = np.random.default_rng(0).normal(size=(50, 3)) * (1, 2, 5) + 7
    scaled = evaluate.standardise(features)
    assert np.allclose(scaled.mean(0), 0) and np.isclose(scaled.var(0).mean(), 1)
    assert np.ptp((features - features[0])[1:] / (scaled - scaled[0])[1:]) < 1e-9  # one factor for all


def test_agents_solve_a_small_maze_and_the_critic_finds_its_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    maze = write(tmp_path, "S.....\n.####.\n.....G\n")
    for command, repeats in (("prediction", False), ("control", False), ("control", True)):
        path = Path(f"runs/evaluations/gridworld_{command}.csv")
        before = files("runs")
        cli(f"evaluate.py {command} --features onehot --env {{maze}} --updates 400 --log-every 50 "
            "--starts uniform --learning-rate 0.01 --horizon 30", maze=maze)
        rows = evaluate.read_results(path)
        last = {row["metric"]: float(row["value"]) for row in rows if row["step"] == "400"}
        assert last["reward"] > 0.95 and (command == "control" or last["error_policy"] < 0.05)
        assert (files("runs") == before) == repeats  # the same rows, replaced


def test_writers_side_by_side_lose_no_row(tmp_path):
    path = tmp_path / "r.csv"

    def add(seed):
        for step in range(5):
            evaluate.add_results(path, [("e", "m", "umaze", seed, 0, step, "x", seed + step / 10)])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    rows = evaluate.read_results(path)
    assert [(row["run_seed"], row["step"]) for row in rows] == [(str(seed), "4") for seed in range(8)]


@pytest.fixture(scope="module")
def ant_runs(tmp_path_factory):
    """{script: run directory} of a few updates on AntMaze-1."""
    root, few = tmp_path_factory.mktemp("ants"), dict(env="antmaze1", num_envs=4, log_every=2)
    runs = {"tatc": small(TATC, root, "tatc", **few | dict(updates=4, skill_length=10, episode_length=20)),
            "laprep": small(LAP, root, "laprep", **few | dict(
                updates=20, samples=1000, episode_length=50, objective="allo", reachability=True, dim=3)),
            "dco": small(DCO, root, "dco", **few | ANT_DCO | dict(num_skills=3)),
            "diayn": small(DIAYN, root, "diayn", **few)}
    return {name: trained(args) and Path(args.run_dir) for name, args in runs.items()}


def test_shaping_remembers_what_its_ants_did():
    """Rows of the replay are the ants' own steps; a fall ends one, a diverged ant leaves none."""
    env = ANT("antmaze1", 3)
    args, reward = SHAPING(steps=300, num_envs=3, horizon=4), evaluate.make_reward("xy", env, None)
    agent = evaluate.Sac(args, env, reward)
    for step in range(6):
        states, filled = env.obs.copy(), agent.replay.filled
        if step == 2:
            states[0, 2:7] = 0.3, 0, 1, 0, 0  # on its back
        if step == 3:
            states[1, 15] = 1e6  # leaves the maze
        env.place(np.ones(3, bool), states)
        before = env.obs
        agent.step()
        obs, _, after, progress, ended = np.split(
            agent.replay.rows[filled:agent.replay.filled], agent.replay.splits, axis=1)
        assert np.array_equal(obs, before[[0, 2] if step == 3 else [0, 1, 2]])
        assert np.array_equal(ended[:, 0] == 1, antmaze.on_back(after)) and ended.any() == (step == 2)
        assert np.allclose(progress[:, 0], reward(after) - reward(obs), atol=1e-6)
        assert step != 3 or np.abs(env.obs[:, :2]).max() < 0.2  # the episodes are over: all are at s0


def test_shaping_rewards(ant_runs):
    env = ANT("antmaze1", 1)
    _, _, phi = evaluate.load_phi(ant_runs["tatc"])
    plain, straight, fiedler = (np.linalg.norm(points - points[env.goal_index], axis=1) for points in (
        phi(env.truth_obs), env.truth_xy, env.laplacian_eigenvectors(2)[1][:, 1:]))
    near = straight <= 2
    for kind, expected in {
            "dense": -10 * plain / np.ptp(plain), "mix": 10 * (near - plain) / np.ptp(plain),
            "xy": -10 * straight / np.ptp(straight), "fiedler": -10 * fiedler / np.ptp(fiedler),
            "sparse": 10 * near}.items():
        reward = evaluate.make_reward(kind, env, phi)
        assert np.allclose(reward(env.truth_obs), expected, rtol=1e-4, atol=1e-5), kind


def test_every_run_can_be_scored_copied_and_evaluated(ant_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli("evaluate.py scores --runs {tatc} {laprep} {dco} {diayn} --results-dir results", **ant_runs)
    for name, run in ant_runs.items():
        facts, content = json.loads((run / "args.json").read_text()), checkpoint(run)
        shown = {"tatc": ["representation", "progress", "skills"], "laprep": ["representation", "progress"]}
        assert {path.stem for path in run.glob("*.png")} == {*shown.get(name, ["skills"]), "curves"}
        assert facts["script"] == content["script"] == name and facts["variant"] == content["variant"]
        assert facts["env_name"] == "antmaze1" and facts["episode_length"] and "commit" in facts
        assert [int(row["update"]) for row in metrics(run)] == [row["update"] for row in content["rows"]]
    rows = evaluate.read_results(Path("results/antmaze_training.csv"))
    assert len({(row["method"], row["step"], row["metric"]) for row in rows}) == len(rows)
    ours = {row["metric"]: float(row["value"]) for row in rows if row["method"].startswith("TATC")}
    assert {"travel", "reaches_end", "fallen", "spearman_s0", "coverage_total"} <= set(ours)
    found = {row["metric"] for row in rows}
    assert {"subspace", "cosine", "fiedler_r2", "far", "fiedler_cosine", "reaches", "accuracy"} <= found
    assert 0 <= ours["travel"] <= 1 and ours["distance"] > 0
    cli("evaluate.py curves --runs {tatc} {laprep} {dco} {diayn}", **ant_runs)
    assert list(Path().rglob("*.png")) == [Path("curves.png")]
    skills = ("evaluate.py skills --horizon 12 --skill-length 5 --rollouts 2 --batch 4 --episodes 8 "
              "--log-every 1 --results-dir results")
    for path in Path("results/checkpoints").iterdir():  # the small copies are all that using them takes
        script = path.name.split("-")[0]
        assert path.stat().st_size < 6_000_000
        if script in ("tatc", "laprep"):
            _, env, phi = evaluate.load_phi(path)
            with np.load(f"results/phi/{path.stem}.npz") as file:
                assert np.allclose(phi(env.truth_obs), file["phi"], atol=1e-6)
        if script != "laprep":
            cli(f"{skills} --run {{path}}", path=path)
    for floor in ("--floor actions", "--floor skills", "--floor choices --run {tatc}",
                  "--no-option-ends --run {dco}"):
        cli(f"{skills} {floor}", **ant_runs)
    rows = evaluate.read_results(Path("results/antmaze_skills.csv"))
    assert len(methods := {row["method"] for row in rows}) == 7
    assert sum("option_ends=False" in method for method in methods) == 1
    for option_ends in (True, False):  # 30 % of the states are an option's end
        _, env, options, _ = evaluate.load_skills(ant_runs["dco"], 1, 0, None, option_ends)
        assert options.ended(env.truth_obs, np.zeros(len(env.truth_obs), int)).any() == option_ends
    assert {row["metric"] for row in rows} == {"success", "cells", "cells_passed_on"}
    for run_dir in ("first", "second"):  # which finds the rows there
        cli("evaluate.py shaping --run {laprep} --steps 40 --num-envs 4 --warmup 20 --horizon 5 --resume "
            f"--run-dir {run_dir} --results-dir results", **ant_runs)
    assert Path("first").exists() and not Path("second").exists()
    rows = evaluate.read_results(Path("results/antmaze_shaping.csv"))
    assert {row["metric"] for row in rows} == {"success", "success_at_end", "distance", "fallen"}


def test_skills_choices_and_returns():
    """An option that ended may not start; where none may, any does, for a step; returns to go are sums."""
    env, rng, asked = ANT("antmaze1", 3), np.random.default_rng(0), []

    def stand(obs, skill):
        return np.zeros((3, 8))

    def choose(t, ants, obs, allowed):
        asked.append((t, ants.tolist(), allowed.tolist()))
        return evaluate.random_choice(allowed, rng)
    for ended, times, allowed in ((1, (0, 3, 6), [True, False, True]), (range(3), range(7), [True] * 3)):
        skills = evaluate.Skills(3, stand, lambda obs, skill: np.isin(skill, ended))  # noqa: B023
        assert len(list(evaluate.run_skills(env, skills, choose, 7, 3))) == 7
        assert asked == [(t, [0, 1, 2], [allowed] * 3) for t in times]
        asked.clear()
    env.goal_xy = np.zeros(2)  # every step has reward 1
    (obs, allowed, choice, time_left, to_go), rewards = evaluate.high_level_episodes(
        evaluate.SkillsTask(horizon=7, skill_length=3), env, evaluate.Skills(2, stand, evaluate.never_ended),
        None, rng)
    assert rewards.shape == (7, 3) and rewards.all()
    for found in (to_go, time_left[:, 0]):
        assert found.tolist() == pytest.approx([1] * 3 + [4 / 7] * 3 + [1 / 7] * 3)
    logits, value = torch.randn(9, 2), torch.randn(9)
    loss = evaluate.choice_loss(logits, allowed, choice, value, to_go, 0.1)
    expected = 0.0
    for pi, z, v, g in zip(logits.softmax(1), choice, value, to_go):
        expected += -pi[z].log() * (g - v) + 0.1 * (pi * pi.log()).sum() + (g - v) ** 2
    assert torch.isclose(loss, expected / 9)


# ------------------------------------------------------------------------------------ refusals, for the table
COMMANDS = {  # of every dataclass with numbers
    TATC: "tatc.py", LAP: "laprep.py", DCO: "baselines_dco_diayn.py dco",
    DIAYN: "baselines_dco_diayn.py diayn", evaluate.Prediction: "evaluate.py prediction --features onehot",
    evaluate.Film: "evaluate.py film --run x", SHAPING: "evaluate.py shaping --reward xy",
    evaluate.SkillsTask: "evaluate.py skills --floor actions"}


def out_of_range():
    """(command, message) of every number just below and above its range, and NaN for a float."""
    for kind, command in COMMANDS.items():
        ranges = sys.modules[kind.__module__].RANGES
        for field in (field for field in dataclasses.fields(kind) if field.name in ranges):
            (low, high), flag = ranges[field.name], f"--{field.name.replace('_', '-')}"
            reals = low - 1e-9, high * (1 + 1e-9), math.nan, math.inf
            for value in reals if "float" in str(field.type) else (low - 1, high + 1):
                yield f"{command} {flag} {value}", f"{flag} is .*; use a number from "


# (command, regular expression of the message)
REFUSALS = [
    ("laprep.py --discount 1.0", "--discount is 1"), ("antmaze.py --seed -1", "--seed is -1"),
    ("baselines_dco_diayn.py diayn --gamma 1.0", "--gamma is 1.0"),
    ("evaluate.py shaping --reward xy --gamma 1", "--gamma is 1"),
    ("laprep.py --env {small} --dim 9", "--dim is 9; .* has 8 states to judge it by"),
    ("laprep.py --pair-gap 7", "--pair-gap is 7; use a divisor of --episode-length 90"),
    ("baselines_dco_diayn.py dco --pair-gap 7", "use a divisor of --episode-length 500"),
    ("laprep.py --reachability", "--reachability needs eigenvalues; add --objective allo"),
    ("laprep.py --reachability --objective allo --dim 1", "and --dim 2 or more"),
    ("laprep.py --env {leaves}:make", "failed with SystemExit: 0; mend the file"),
    ("baselines_dco_diayn.py dco --hidden", "--hidden is empty; give the units of at least one layer"),
    ("baselines_dco_diayn.py diayn --env own.py:make", "your own environment trains with tatc.py"),
    ("baselines_dco_diayn.py diayn --num-skills 1", "DIAYN needs --num-skills 2 or more"),
    ("baselines_dco_diayn.py diayn --env 4rooms --discriminator xy", "xy an ant maze"),
    ("tatc.py --env nowhere", "unknown env 'nowhere': not one of umaze, .*antmaze-large, and no file"),
    ("tatc.py --env ant:nowhere.txt", "nowhere.txt is not a text file"),
    ("tatc.py --env nowhere.py:make", "nowhere.py is not a text file"),
    ("tatc.py --env {root}", "is not a text file"), ("tatc.py --env {root}/LICENSE", "LICENSE, line"),
    ("tatc.py --env {root}/tatc.py:nothing", "has no function nothing"),
    ("tatc.py --env {nothing}:make", "has no function make; define make"),
    ("tatc.py --env {syntax}:make", "failed with SyntaxError: .*; mend the file"),
    ("tatc.py --skill-length 7", "--skill-length is 7; use a divisor of --episode-length 90"),
    ("tatc.py --pair-gap 7", "--pair-gap is 7; use a divisor of --skill-length 30"),
    ("tatc.py --skills-per-update 2", "--skills-per-update is 2; use a divisor of L = K / c = 3"),
    ("tatc.py --run-dir=", "--run-dir is empty"),
    ("tatc.py --run-dir {file}", "exists|Not a directory|File exists"),
    ("gridworld.py --picture nowhere/x.png", "use a name that ends with"),
    ("evaluate.py prediction", "give either --run RUN_DIR or --features"),
    ("evaluate.py prediction --features exact --dim 173", "--dim is 173; use at most 172"),
    ("evaluate.py prediction --features exact --env antmaze1", "on gridworlds, this is antmaze1"),
    ("evaluate.py prediction --features exact --env {goalless}", "has no goal; mark one cell with G"),
    ("evaluate.py prediction --features exact --starts", "--starts is empty"),
    ("evaluate.py prediction --features onehot --results-dir {bad}", "line 2: not 8 fields"),
    ("evaluate.py control --features onehot --results-dir {file}", "exists|Not a directory|File exists"),
    ("evaluate.py control --features onehot --results-dir {bad}", "is not a results file"),
    ("evaluate.py shaping", "--reward dense needs --run"),
    ("evaluate.py shaping --reward xy --run x", "uses no representation; drop --run"),
    ("evaluate.py shaping --reward xy --results-dir {bad}", "is not UTF-8 text"),
    ("evaluate.py shaping --reward sparse --env umaze", "on ant mazes, this is umaze"),
    ("evaluate.py skills", "give --run RUN_DIR, alone or with"),
    ("evaluate.py skills --floor actions --run x", "give --run RUN_DIR, alone or with"),
    ("evaluate.py skills --floor choices", "give --run RUN_DIR, alone or with"),
    ("evaluate.py skills --floor skills --env umaze", "is an evaluation on ant mazes"),
    ("evaluate.py skills --run {laprep}", "has no skills; give a run of tatc.py"),
    ("evaluate.py scores --runs nowhere", "nowhere does not exist"),
    ("evaluate.py film --run {laprep} --path x.mp4", "use a name that ends with .gif"),
    ("evaluate.py plan --experiment", "--experiment is empty"),
    ("evaluate.py figures --results-dir nowhere", "nowhere holds no result files"),
    ("evaluate.py figures --results-dir {bad}", "line 2: not 8 fields"),
]


def test_malformed_input_gets_one_line_and_changes_nothing(tmp_path, monkeypatch):
    """Every refusal of every script: exit code 2, one line with cause and fix, no file made or changed."""
    monkeypatch.chdir(tmp_path)
    head = ",".join(evaluate.COLUMNS)
    (tmp_path / "bad").mkdir()
    for name, text in {"gridworld_control": "a,b\n1,2\n", "gridworld_prediction": f"{head}\na,TATC,umaze\n",
                       "gridworld_training": f"{head}\ntraining,TATC,umaze,0,0,ten,far,1\n"}.items():
        write(tmp_path / "bad", text, f"{name}.csv")
    (tmp_path / "bad/antmaze_shaping.csv").write_bytes(b"\xff\xfe")
    names = {name.split(".")[0]: write(tmp_path, text, name) for name, text in {
        "small.txt": SMALL_MAZE, "file": "", "goalless.txt": "S..\n", "syntax.py": "def make(",
        "leaves.py": "import sys\nsys.exit(0)\n",
        "nothing.py": "def make(num_envs, seed):\n    pass\n"}.items()}
    checkpoint = ROOT / "results/checkpoints/laprep-antmaze1-prior=uniform-seed10.pt"
    before, table = files(tmp_path), [*REFUSALS, *out_of_range()]
    assert len(table) >= 230
    for command, message in table:
        code, _, err = shell(command, root=ROOT, bad="bad", laprep=checkpoint, **names)
        assert code == 2 and err.strip().count("\n") == 0, (command, err)
        assert re.match(rf"{command.split()[0]}: .*({message})", err.strip()), (command, err)
    assert files(tmp_path) == before


# --------------------------------------------------------------------------------------------- the repository
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_read_and_every_number_has_a_range(script):
    source, module = (ROOT / f"{script}.py").read_text(), SCRIPTS[script]
    read = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    kinds = [kind for kind in vars(module).values()
             if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__]
    assert kinds
    shared = (ROOT / "gridworld.py").read_text()
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        assert field.name in read or f"args.{field.name}" in shared, f"{field.name} is never read"
        if re.search(r"\b(int|float)\b", str(field.type)) and script not in ("gridworld", "antmaze"):
            assert field.name in module.RANGES, f"{field.name} has no range"


def test_files_are_narrow_and_name_no_machine():
    for path in [*ROOT.glob("*.py"), ROOT / "README.md", ROOT / "results/README.md"]:
        lines = path.read_text().splitlines()
        assert path.suffix == ".md" or max(map(len, lines)) <= 110, path
        assert not re.search(r"/(home|root|work|tmp)/", path.read_text()) or path.name == "test_all.py", path
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def readme_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_commands_parse_and_links_and_functions_exist():
    commands = re.findall(r"python (\w+\.py[^|>&\n]*)", "\n".join(readme_blocks("bash")))
    assert len([parsed(command) for command in commands]) >= 12
    for name in ("README.md", "results/README.md"):
        folder = (ROOT / name).parent
        text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
        for label, target in re.findall(r"\[([^]]*)\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            if path.startswith("http"):
                continue
            path = folder / path if path else ROOT / name
            assert path.exists(), f"{name}: {target}"
            if path.suffix == ".py":  # a departure links to its line
                line = path.read_text().splitlines()[int(anchor[1:]) - 1]
                assert re.search(rf"\b{label}\b", line), f"{name}: {target}"
            elif anchor:
                headings = re.findall("^#+ (.*)", path.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")
                                  for heading in headings}, f"{name}: {target}"
        for script, function in re.findall(r"`(\w+)\.py`: `(\w+)`", text):
            assert hasattr(SCRIPTS[script], function), f"{name}: {script}.{function}"


def test_readme_examples_run(tmp_path, monkeypatch):
    """The own environment trains for a few updates, and every Python block runs as it stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "results").symlink_to(ROOT / "results")
    own, *others = sorted(readme_blocks("python"), key=lambda block: "make = " not in block)
    assert len(Path(write(tmp_path, own, "mountain_car.py")).read_text().splitlines()) <= 45
    code, out, err = shell("tatc.py --env mountain_car.py:make --num-envs 4 --updates 3")
    assert code == 0 and "coverage_total" in out and "spearman" not in out, err
    cli("laprep.py --env mountain_car.py:make --num-envs 4 --updates 10 --samples 2000")
    run = next(Path("runs/tatc").rglob("checkpoint.pt")).parent
    for command in ("shaping", "skills", "prediction"):
        code, _, err = shell(f"evaluate.py {command} --run {run}")
        assert code == 2 and "is an evaluation on" in err and err.count("\n") == 1
    for block in others:
        code = compile(block, "README.md", "exec")
        if "stable_baselines3" not in block or importlib.util.find_spec("stable_baselines3"):
            exec(code, {})


def test_plan_lines_parse_once_each_and_trainings_come_first():
    _, plan, _ = shell("evaluate.py plan")
    lines, runs = [line.removeprefix("python ") for line in plan.splitlines()], set()
    assert len(lines) == len(set(lines)) > 300 and all("core-minutes" in line for line in lines)
    kinds = ["evaluate" if "evaluate.py" in line else "train" for line in lines]
    assert kinds == sorted(kinds, reverse=True) and "figures" in lines[-1]
    for line, kind in zip(lines, kinds):
        args = parsed(line)
        if kind == "train":
            script, variant, env = evaluate.run_of(line.split(" --env ")[0], args.env)
            runs.add(f"runs/{script}/{env}/{variant}/seed{args.seed}")
        else:
            assert {getattr(args, "run", None), *getattr(args, "runs", ())} - {None} <= runs


def test_a_plan_of_seconds_runs_and_repeated_finds_itself_finished(tmp_path, monkeypatch):
    """A training with its evaluations in real processes, with budgets of seconds; then all lines again."""
    monkeypatch.chdir(tmp_path)
    _, plan, _ = shell("evaluate.py plan --experiment gridworld control --results-dir out")
    lines = [line for line in plan.splitlines() if "4rooms" in line and re.search("seed ?10", line)
             and ("tatc" in line or "onehot" in line)]
    assert len(lines) == 4  # a training, its scores, and two evaluations
    for old, new in (("tatc.py", "tatc.py --updates 4 --log-every 2"), ("control", "control --updates 4"),
                     ("4rooms/default", "4rooms/updates=4,log_every=2")):
        lines = [line.replace(old, new) for line in lines]
    for stage in (False, True):
        part = [line.replace("python ", f"{sys.executable} {ROOT}/", 1) for line in lines
                if ("evaluate.py" in line) == stage]
        subprocess.run(["xargs", "-P", "2", "-I", "{}", "bash", "-c", "{} > log.txt 2>&1 || exit 255"],
                       input="\n".join(part), text=True, check=True)
    first = files("out", "*.csv")  # whose methods are all that differs from the defaults, in both commands
    assert {path.stem: {row["method"] for row in evaluate.read_results(path)} for path in first} == {
        "gridworld_training": {"TATC updates=4,log_every=2"},
        "gridworld_control": {"TATC updates=4,log_every=2 updates=4", "one-hot updates=4"}}
    for line in lines:
        cli(line.removeprefix("python "))
    assert first == files("out", "*.csv")
    head = subprocess.run(f"{sys.executable} {ROOT}/evaluate.py plan | head -1", shell=True,
                          capture_output=True, text=True)
    assert "Traceback" not in head.stderr and head.stdout.startswith("python tatc.py")


def test_tables_are_the_committed_rows_and_figures_from_a_clean_clone_change_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "results", "results")
    tables = {path.stem: evaluate.read_results(path) for path in Path("results").glob("*.csv")}
    assert all(tables.values())  # and no line was refused
    for env in gridworld.MAZES:  # three cells by other code; the last row of a seed is its last step
        last = {row["run_seed"]: row for row in tables["gridworld_training"]
                if (row["method"], row["metric"], row["env"]) == ("TATC", "spearman_s0", env)}
        steps, cell = max(int(row["step"]) for row in last.values()), " ".join(
            f"{float(row['value']):.3f}" for _, row in sorted(last.items()))
        line = f"| {gridworld.TITLES[env]}: TATC | {len(last)} | {steps:,} | {cell} |"
        assert line in Path("results/README.md").read_text()
    before = files(".", "*.md")
    cli("evaluate.py figures")
    assert files(".", "*.md") == before
    path = Path("results/gridworld_training.csv")  # a run that was scored halfway: in the columns it reached
    ours = [row for row in tables[path.stem] if row["method"] == "TATC prior=uniform,boredom_coef=0"
            and row["env"] == "umaze" and row["run_seed"] == "10" and int(row["step"]) <= 10_080_000]
    evaluate.add_results(path, [(*list(row.values())[:-1], float(row["value"])) for row in ours]
                         + [(*evaluate.key_of(ours[0]), 10_080_000, "update", 3500)])
    cli("evaluate.py figures")
    columns = re.findall(r"\| U-Maze \|(.*)\|(.*)\|(.*)\|(.*)\|", Path("results/README.md").read_text())[0]
    assert [len(column.split()) for column in columns] == [5, 5, 4, 4]
    text = write(tmp_path / "results", "<!-- table:gridworld -->\n\ntext that must stay\n", "README.md")
    code, _, err = shell("evaluate.py figures")
    assert code == 2 and "has no <!-- end -->" in err
    assert Path(text).read_text().endswith("text that must stay\n")

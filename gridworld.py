"""Gridworld mazes of TATC (Erraqabi et al., UAI 2022): batched dynamics, exact ground truth, drawing.

    python gridworld.py                  # draws the three mazes and prints their facts
    python gridworld.py --maze my.txt    # the same for a maze of your own

A state is an integer index; the paper's one-hot code is its row of the identity. Coordinates are (x, y),
1-based, y up. The paper gives the mazes' sizes, goals and the episode length K, "around" the distance of the
furthest state, but no cell counts. U-Maze's furthest state is 85 steps away (K = 90; 79 with a corridor 5
wide), 4-rooms' 59 (K = 60; 56 with doors 3 wide), T-Maze's 53 (K = 40): as far as its goal, at any width.

The file also holds what every script needs and no algorithm is about: the one reader of maze text, the one
line that bad input gets (`guarded`), run directories that resume bit for bit, and scores and pictures of phi
for any environment.
"""

import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

import filelock
import gymnasium
import matplotlib
import numpy as np
import scipy.linalg
import scipy.ndimage
import scipy.sparse
import scipy.stats
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from matplotlib.figure import Figure

ROOMS = 10 * "." + "#" + 10 * "."  # a row of two rooms side by side
MAZES = {
    # 30x30, corridor 2 wide along the bottom, the right side and the top; goal (1, 30), 85 steps from (1, 1).
    "umaze": "\n".join(["G" + 29 * ".", 30 * "."] + 26 * [28 * "#" + ".."] + [30 * ".", "S" + 29 * "."]),
    # 40x30, inverted T: bottom corridor 5 high, stem in columns 16-25; goal (25, 30), 53 steps from (1, 1).
    "tmaze": "\n".join([15 * "#" + 9 * "." + "G" + 15 * "#"] + 24 * [15 * "#" + 10 * "." + 15 * "#"]
                       + 4 * [40 * "."] + ["S" + 39 * "."]),
    # 21x21, doors of one cell from room 1 (bottom left) to 2 (right) to 3 (top right) to 4 (top left), none
    # from 1 to 4; goal (1, 21), 58 steps from (1, 1).
    "4rooms": "\n".join(["G" + ROOMS[1:]] + 3 * [ROOMS] + [21 * "."] + 5 * [ROOMS] + [19 * "#" + ".#"]
                        + 5 * [ROOMS] + [21 * "."] + 3 * [ROOMS] + ["S" + ROOMS[1:]]),
}
TITLES = {"umaze": "U-Maze", "tmaze": "T-Maze", "4rooms": "4-rooms"}
MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # (dx, dy) of the actions: up, right, down, left
MOST_STATES = 6000  # the table of all distances then takes 300 MB


# -------------------------------------------------------------------------------------- bad input, interrupts
class UsageError(ValueError):
    """A request that cannot be met; the message names the cause and the fix."""


def default(table, name):
    """What --help shows as the default of a field that depends on --env or on another argument."""
    known = ", ".join(f"{key} {values[name]}" for key, values in table.items() if name in values)
    return tyro.conf.arg(help_behavior_hint=f"(default: {known})")


def check_ranges(args, ranges):
    """Every number of a dataclass within (low, high), both included; None and fields without a range pass."""
    for name, (low, high) in ranges.items():
        value = getattr(args, name, None)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not low <= number <= high:  # NaN fails too
                raise UsageError(f"--{name.replace('_', '-')} is {number}; "
                                 f"use a number from {low:g} to {high:g}")


def picture_path(path, endings=(".png", ".pdf", ".svg")):
    """The path of a picture that can be written, or one line that says why not."""
    if Path(path).suffix not in endings or not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{path}: use a name that ends with {' or '.join(endings)} "
                         "in a directory that exists")
    return Path(path)


def guarded(main):
    """Runs main(); an error that the user can fix prints one line and exits with 2, an interrupt with 130."""
    script = Path(sys.argv[0]).name
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        main()
        print(end="", flush=True)
    except KeyboardInterrupt:
        print(f"\n{script}: interrupted; a training continues with --resume", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `... | head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UsageError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's MemoryError
            raise
        text = str(error) or "out of memory; use smaller sizes"
        print(f"{script}: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def stop_requests():
    """A list that Ctrl-C and SIGTERM fill, so that a loop can save its state between two updates; a second
    one interrupts at once."""
    requests = []

    def handler(number, frame):
        if requests:
            raise KeyboardInterrupt
        requests.append(number)

    try:
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread takes signals
        previous = {}
    try:
        yield requests
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


# -------------------------------------------------------------------------------------------------- maze text
def parse_maze(text, name):
    """Maze text -> (free [H, W] bool, start (row, column), goal (row, column) or None); row 0 is the top.

    '#' wall, '.' or ' ' free, 'S' start, 'G' goal; beyond the text is wall. Free cells that cannot be reached
    from S become walls, so that every state has a finite distance.
    """
    lines = text.rstrip("\r\n").splitlines()
    if not lines:
        raise UsageError(f"{name}: the maze is empty; write at least one row with an S")
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise UsageError(f"{name}, line {number}: {len(line)} characters "
                             f"but line 1 has {len(lines[0])}; pad it with '#'")
        if unknown := line.strip("#. SG"):
            raise UsageError(f"{name}, line {number}: unknown character {unknown[0]!r}; "
                             "use only '#', '.', ' ', 'S', 'G'")
    cells = np.array([list(line) for line in lines])
    starts, goals = (list(zip(*np.nonzero(cells == mark))) for mark in "SG")
    if len(starts) != 1:
        raise UsageError(f"{name}: {len(starts)} start cells; mark exactly one free cell with S")
    if len(goals) > 1:
        raise UsageError(f"{name}, line {goals[1][0] + 1}: a second goal; mark at most one cell with G")
    start, goal = starts[0], goals[0] if goals else None
    labels, _ = scipy.ndimage.label(cells != "#")
    free = labels == labels[start]
    if free.sum() < 3:
        raise UsageError(f"{name}, line {start[0] + 1}: {free.sum()} cells can be reached from the start; "
                         "open at least 3")
    if goal is not None and not free[goal]:
        raise UsageError(f"{name}, line {goal[0] + 1}: the goal cannot be reached from the start; "
                         "open a path or move G")
    lost = (cells != "#").sum() - free.sum()
    if lost:
        print(f"{name}: {lost} free cells cannot be reached from S and count as walls", file=sys.stderr)
    return free, start, goal


def read_text(path, most=1_000_000):
    """A text file of at most `most` bytes, or one line that says why not."""
    try:
        if not Path(path).is_file() or Path(path).stat().st_size > most:
            raise UsageError(f"{path} is not a text file of at most {most // 1_000_000} MB")
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None


def file_name(path, text):
    """A name for a file's content, fit for paths and tables; files with other content get other names."""
    return (re.sub(r"[^A-Za-z0-9_.]", "_", Path(path).stem) + "-"
            + hashlib.sha256(text.encode()).hexdigest()[:6])


def read_maze(maze, built_in, most):
    """(unique name, free, start, goal) of a built-in maze or a text file with at most `most` free cells."""
    if maze in built_in:
        return maze, *parse_maze(built_in[maze], maze)
    text = read_text(maze)
    free, start, goal = parse_maze(text, maze)
    if free.sum() > most:
        raise UsageError(f"{maze}: {free.sum()} free cells; use at most {most}")
    return file_name(maze, text), free, start, goal


# ------------------------------------------------------------------------------------------------ environment
def whole(value, low, high=math.inf):
    return isinstance(value, (int, np.integer)) and low <= value <= high


def set_up(env, num_envs, seed, start, max_episode_steps, render_mode, num_threads=1):
    """What the constructors of both domains refuse, and what they keep."""
    for name, value, fits, use in (
            ("num_envs", num_envs, whole(num_envs, 1, 2**20), f"an integer from 1 to {2**20}"),
            ("num_threads", num_threads, whole(num_threads, 1, 1024), "an integer from 1 to 1024"),
            ("seed", seed, seed is None or whole(seed, 0, 2**64), f"an integer from 0 to {2**64}"),
            ("max_episode_steps", max_episode_steps, max_episode_steps >= 1, "at least 1"),
            ("start", start, start in ("s0", "uniform"), "'s0' or 'uniform'"),
            ("render_mode", render_mode, render_mode in (None, "rgb_array"), "None or 'rgb_array'")):
        if not fits:
            raise UsageError(f"{name} is {value!r}; use {use}")
    env.num_envs, env.start, env.max_episode_steps = int(num_envs), start, max_episode_steps
    env.render_mode, env.rng = render_mode, np.random.default_rng(seed)
    env.elapsed, env.autoreset = np.zeros(num_envs, dtype=np.int64), np.zeros(num_envs, dtype=bool)


def goal_reset(env, seed, options):
    """`reset` of both domains. Options: {"start": "s0", "uniform" or states}, {"reset_mask": bool [N]}."""
    options = options or {}
    if seed is not None:
        env.rng = np.random.default_rng(seed)
    mask = np.asarray(options.get("reset_mask", np.ones(env.num_envs, dtype=bool)))
    if mask.shape != (env.num_envs,) or mask.dtype != bool:
        raise UsageError(f"reset_mask has shape {mask.shape} and type {mask.dtype}; "
                         f"use bool [{env.num_envs}]")
    env.place(mask, options.get("start", env.start))
    env.elapsed[mask] = 0
    env.autoreset[mask] = False
    return env.obs.copy(), {}


def goal_step(env, reached, failed=False):
    """`step` of both domains after its move -> obs, reward, terminated, truncated; reached, failed [N] bool.

    NEXT_STEP autoreset: the step after an episode's end ignores its action and begins the next episode.
    """
    fresh = env.autoreset
    if fresh.any():
        env.place(fresh, env.start)
    env.elapsed = np.where(fresh, 0, env.elapsed + 1)
    reached = reached & ~fresh
    truncated = ((env.elapsed >= env.max_episode_steps) | failed) & ~reached & ~fresh
    env.autoreset = reached | truncated
    return env.obs.copy(), reached.astype(np.float64), reached, truncated


class GridWorldVec(VectorEnv):
    """N agents in lock-step in one maze.

    Training loops use the episode-free part: `obs` [N], `move`, `place`, `get_state`, `set_state`. `reset`
    and `step` are Gymnasium's goal task on top of it: reward 1 on reaching the goal, which terminates;
    truncation after max_episode_steps.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, maze="umaze", num_envs=1, seed=None, *, start="s0", max_episode_steps=100,
                 render_mode=None):
        set_up(self, num_envs, seed, start, max_episode_steps, render_mode)
        self.name, self.free, start_cell, goal_cell = read_maze(maze, MAZES, MOST_STATES)
        rows, columns = np.nonzero(self.free)
        self.num_states = len(rows)
        self.truth_obs = np.arange(self.num_states)
        index = np.full(self.free.shape, -1)
        index[self.free] = self.truth_obs
        self.truth_xy = np.stack([columns + 1, len(self.free) - rows], axis=1)  # [S, 2]
        self.start_index = int(index[start_cell])
        self.goal_index = None if goal_cell is None else int(index[goal_cell])

        right, up = MOVES.T
        target = np.pad(index, 1, constant_values=-1)[rows[:, None] + 1 - up, columns[:, None] + 1 + right]
        self.next_state = np.where(target < 0, self.truth_obs[:, None], target)  # [S, 4]
        edges = np.repeat(self.truth_obs, 4), self.next_state.ravel()
        adjacency = scipy.sparse.csr_matrix((np.ones(4 * self.num_states), edges), (self.num_states,) * 2)
        self.distance = scipy.sparse.csgraph.shortest_path(  # [S, S]
            adjacency, unweighted=True).astype(np.float32)

        # What the algorithm files ask of an environment beside its dynamics (README, "Your own environment").
        self.action_shape, self.obs_size, self.obs_scale, self.phi_scale = (1, 4), self.num_states, None, None
        self.num_cells, self.cell_distance = self.num_states, self.distance[self.start_index]

        self.single_observation_space = gymnasium.spaces.Discrete(self.num_states)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.obs = np.full(num_envs, self.start_index)

    # ---------------------------------------------------------------------------------- episode-free dynamics
    def move(self, actions):
        """Act with `actions` [N] or [N, 1] in 0..3; returns the next states [N]. A blocked move stays."""
        self.obs = self.next_state[self.obs, actions.reshape(-1)]
        return self.obs

    def place(self, mask, where):
        """Put the agents of `mask` [N] at "s0", at "uniform" free states, or at given states [mask.sum()]."""
        if isinstance(where, str) and where == "s0":
            where = self.start_index
        elif isinstance(where, str) and where == "uniform":
            where = self.rng.integers(self.num_states, size=mask.sum())
        where = np.asarray(where)
        if (where.dtype.kind not in "iu" or where.shape not in ((), (mask.sum(),))
                or (where // self.num_states).any()):
            raise UsageError(f"where must be 's0', 'uniform' or {mask.sum()} states below {self.num_states}")
        self.obs = self.obs.copy()
        self.obs[mask] = where

    def fallen(self):
        """Who has to go back to s0 before the next episode [N]: nobody."""
        return np.zeros(self.num_envs, dtype=bool)

    def cell(self, obs):
        """The coverage cell of each observation: the state itself."""
        return obs

    def get_state(self):
        """Everything that `set_state` needs to continue bit for bit: arrays, numbers and strings."""
        return {"obs": self.obs.copy(), "elapsed": self.elapsed.copy(), "autoreset": self.autoreset.copy(),
                "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        obs, elapsed, autoreset = (np.asarray(state[key]).copy() for key in ("obs", "elapsed", "autoreset"))
        if obs.shape != (self.num_envs,) or not ((0 <= obs) & (obs < self.num_states)).all():
            raise UsageError(f"the stored states are not {self.num_envs} states of {self.name}")
        self.obs, self.elapsed, self.autoreset = obs, elapsed, autoreset
        self.rng.bit_generator.state = state["rng"]

    # ---------------------------------------------------------------------------------- Gymnasium's goal task
    def reset(self, *, seed=None, options=None):
        return goal_reset(self, seed, options)

    def step(self, actions):
        actions = np.asarray(actions)
        if (actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu"
                or not (actions // 4 == 0).all()):
            raise UsageError(f"actions must be {self.num_envs} integers in 0..3")
        return *goal_step(self, self.move(actions) == self.goal_index), {}

    def render(self):
        """A picture [H * 16, W * 16, 3] for each agent: walls grey, the goal green, the agent red."""
        if self.render_mode is None:
            return None
        cells = np.full((self.num_envs, self.num_states, 3), 255)
        if self.goal_index is not None:
            cells[:, self.goal_index] = 60, 180, 75
        cells[range(self.num_envs), self.obs] = 214, 39, 40
        pictures = np.full((self.num_envs, *self.free.shape, 3), 90, dtype=np.uint8)
        pictures[:, self.free] = cells
        return tuple(pictures.repeat(16, axis=1).repeat(16, axis=2))

    # ------------------------------------------------------------------------------------- exact ground truth
    def transition_matrix(self, policy):
        """[S, S] of policy [S, 4]."""
        matrix = np.zeros((self.num_states, self.num_states))
        np.add.at(matrix, (np.repeat(self.truth_obs, 4), self.next_state.ravel()), policy.ravel())
        return matrix

    def laplacian_eigenvectors(self, count):
        """The `count` smallest eigenvalues [count] and eigenvectors [S, count] of I - P, the first constant.

        P is the random walk's matrix: symmetric, since a blocked move stays.
        """
        laplacian = np.eye(self.num_states) - self.transition_matrix(np.full((self.num_states, 4), 0.25))
        return scipy.linalg.eigh(laplacian, subset_by_index=(0, count - 1))

    def optimal_values(self, gamma):
        """V* [S] of the goal task: gamma^(distance - 1), and 0 at the goal itself, which is terminal."""
        distance = self.distance[:, self.goal_index]
        return np.where(distance > 0, gamma ** (distance - 1.0), 0.0)

    def policy_values(self, policy, gamma):
        """V [S] of `policy` [S, 4] on the goal task without the time limit, from the Bellman equation."""
        matrix = self.transition_matrix(policy)
        reward = matrix[:, self.goal_index].copy()
        matrix[:, self.goal_index] = 0.0
        reward[self.goal_index] = matrix[self.goal_index] = 0.0
        return np.linalg.solve(np.eye(self.num_states) - gamma * matrix, reward)

    # ------------------------------------------------------------------------------------------------ drawing
    def draw(self, ax, values=None):
        """The maze, walls black; `values` [S] as colours (default: distance from s0); s0 red, goal green."""
        values = self.distance[self.start_index] if values is None else values
        height, width = self.free.shape
        picture = np.full(self.free.shape, np.nan)
        picture[self.free] = values
        colours = matplotlib.colormaps["viridis"].with_extremes(bad="black")
        ax.imshow(picture, cmap=colours, extent=(0.5, width + 0.5, 0.5, height + 0.5))
        mark_ends(ax, self, self.truth_xy)
        ax.set(xticks=(1, width), yticks=(1, height))

    def draw_skills(self, path, policy, omega, steps):
        """Mean step of each skill; policy(obs [n], skill [n]) -> probabilities [n, 1, 4], omega [skills, d].

        An arrow in every second cell: its direction is the mean step's, its colour the step's length, 0 to 1.
        """
        moved = self.truth_xy[self.next_state] - self.truth_xy[:, None]  # [S, 4, 2]
        shown = (self.truth_xy % 2 == 1).all(1)
        columns = -(-len(omega) // 2)
        figure = Figure(figsize=(3.2 * columns + 1, 7), layout="constrained")
        axes = figure.subplots(2, columns, squeeze=False)
        for skill, (ax, delta) in enumerate(zip(axes.ravel(), omega)):
            chosen = policy(self.truth_obs, np.full(self.num_states, skill))[:, 0]
            step = np.einsum("sa,sad->sd", chosen, moved)
            self.draw(ax, np.zeros(self.num_states))
            ax.images[0].set_cmap(matplotlib.colors.ListedColormap(["white"]).with_extremes(bad="0.6"))
            length = np.linalg.norm(step, axis=1, keepdims=True)
            arrow = 1.7 * step / np.maximum(length, 1e-9)
            arrows = ax.quiver(
                *self.truth_xy[shown].T, *arrow[shown].T, length[shown, 0], angles="xy", scale_units="xy",
                scale=1, pivot="mid", width=0.007, cmap="viridis_r", clim=(0, 1))
            ax.set_title(f"delta = ({delta[0]:.2f}, {delta[1]:.2f})", fontsize=9)
        figure.colorbar(arrows, ax=axes, label="mean step", shrink=0.6)
        figure.savefig(path, dpi=110)


class GridWorldEnv(gymnasium.Env):
    """One agent on the goal task of a maze, without a time limit: gymnasium.make adds it. Arguments as those
    of `kind` without num_envs."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    kind = GridWorldVec

    def __init__(self, *maze, render_mode=None, **kwargs):
        self.vec = self.kind(*maze, num_envs=1, max_episode_steps=math.inf, render_mode=render_mode, **kwargs)
        self.observation_space = self.vec.single_observation_space
        self.action_space = self.vec.single_action_space
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self.vec.reset(seed=seed, options=options)
        return obs[0], info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.vec.step(np.asarray(action)[None])
        info = {name: bool(value[0]) for name, value in info.items() if name[0] != "_"}
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self):
        pictures = self.vec.render()
        return pictures and pictures[0]

    def close(self):
        self.vec.close()


for _id, _maze in (("UMaze", "umaze"), ("TMaze", "tmaze"), ("4Rooms", "4rooms")):
    gymnasium.register(f"TATC/{_id}-v0", entry_point=GridWorldEnv, vector_entry_point=GridWorldVec,
                       max_episode_steps=100, kwargs={"maze": _maze})


# ----------------------------------------------------------------------------- run directories, any algorithm
FREE = ("run_dir", "resume", "checkpoint_every", "tensorboard", "results_dir")  # they change no result


def variant_name(args, base):
    """All that differs from `base`, or "default": two settings never share a directory or a result row."""
    changed = {field.name: getattr(args, field.name) for field in fields(args)
               if field.name not in (*FREE, "env", "seed")
               and getattr(args, field.name) != getattr(base, field.name)}
    return ",".join(f"{name}={value:.12g}" if isinstance(value, float) else f"{name}={value}".replace(" ", "")
                    for name, value in changed.items()) or "default"


def write_atomically(path, content):
    """Write bytes to a temporary file, flush it to disk, rename: a kill leaves the old file or the new one,
    never half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path, scripts):
    """The checkpoint of a run directory or file, by one of `scripts`; whatever is wrong gets one line."""
    path = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise UsageError(f"{path} does not exist; give a run directory with a checkpoint.pt, or a checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch.load does not check the sums
                raise zipfile.BadZipFile
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(f"{path} is damaged or not a checkpoint ({type(error).__name__}); "
                         "restore it or start elsewhere") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("script") not in scripts:
        raise UsageError(f"{path} is not a checkpoint of {' or '.join(scripts)}; choose another")
    kinds = {"args": dict, "env_name": str, "variant": str, "update": int, "networks": dict}
    if (not all(isinstance(checkpoint.get(key), kind) for key, kind in kinds.items())
            or not isinstance(checkpoint["args"].get("env"), str) or "seed" not in checkpoint["args"]
            or checkpoint["update"] < 0 or not all(map(torch.is_tensor, checkpoint["networks"].values()))):
        raise UsageError(f"{path} is of another version of the script; use that version or start elsewhere")
    if not all(torch.isfinite(value).all() for value in checkpoint["networks"].values()):
        raise UsageError(f"{path} holds weights that are not finite; restore it or start elsewhere")
    return checkpoint


def rebuild(path, checkpoint, kind, make_env):
    """(args, env) of a checkpoint, args a `kind`; refuses one whose environment has changed since."""
    args = kind(**checkpoint["args"])
    env = make_env(args.env)
    if env.name != checkpoint["env_name"]:
        raise UsageError(f"{path} was trained on {checkpoint['env_name']}, and {args.env} is {env.name} now")
    return args, env


def load_state(path, load):
    """load(), which restores a checkpoint; parts that are missing or do not fit raise a UsageError."""
    try:
        return load()
    except UsageError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UsageError(f"{path} does not fit this version of the script or this environment "
                         f"({type(error).__name__}); use those it was made with") from None


def restore_run(run, checkpoint):
    """Puts the checkpoint's part of `run` into place; other types and shapes do not fit."""
    for key, value in run.items():
        stored = checkpoint[key]
        if type(stored) is not type(value) or torch.is_tensor(value) and stored.shape != value.shape:
            raise TypeError
        run[key] = stored


@contextmanager
def run_directory(args, env, variant, script, may_change=()):
    """(directory, checkpoint to continue or None): created, locked against a second process, checked before
    anything is written.

    `may_change` names arguments that a continued run may have other values of.
    """
    if args.run_dir == "":
        raise UsageError("--run-dir is empty; name a directory or drop it")
    run_dir = Path(args.run_dir or f"runs/{script}/{env.name}/{variant}/seed{args.seed}")
    run_dir.mkdir(parents=True, exist_ok=True)
    lock, owner = filelock.FileLock(run_dir / ".lock"), run_dir / ".pid"
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UsageError(f"{run_dir} is in use by process {owner.read_text()}; "
                         "wait for it or choose another --run-dir") from None
    with lock:
        owner.write_text(str(os.getpid()))
        present = [name for name in ("checkpoint.pt", "metrics.csv", "args.json")
                   if (run_dir / name).exists()]
        if present and not args.resume:
            raise UsageError(f"{run_dir} holds a run already ({present[0]}); "
                             "add --resume to continue it or choose another --run-dir")
        checkpoint = load_checkpoint(run_dir, (script,)) if "checkpoint.pt" in present else None
        if checkpoint is not None:
            here, there = (asdict(args) | {"env": env.name},
                           checkpoint["args"] | {"env": checkpoint["env_name"]})
            other = [f"{key} {there.get(key)!r} there, {value!r} here" for key, value in here.items()
                     if key not in (*FREE, *may_change) and there.get(key) != value]
            if other:
                raise UsageError(f"{run_dir} is of another run ({'; '.join(other)}); "
                                 "use its arguments or another --run-dir")
            unlogged = checkpoint.get("rows") == []  # the pictures need a row: one more update has to come
            if checkpoint["update"] + unlogged > getattr(args, "updates", math.inf):
                raise UsageError(f"{run_dir} has {checkpoint['update']} updates already; use more --updates")
        if getattr(args, "tensorboard", False):
            tensorboard_writer(run_dir)
        print(f"writing to {run_dir}"
              + (f", continuing after update {checkpoint['update']}" if checkpoint else ""))
        yield run_dir, checkpoint


def write_args(args, env, variant, script, run_dir):
    """args.json: the resolved arguments, versions and the commit."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent,
                         capture_output=True, text=True)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    facts = {"script": script, "variant": variant, "env_name": env.name, "versions": versions,
             "commit": git.stdout.strip()}
    write_atomically(run_dir / "args.json", json.dumps(asdict(args) | facts, indent=2).encode())


def save_checkpoint(run_dir, script, variant, env, args, content):
    """checkpoint.pt: what it is of, and all that a continued run needs."""
    facts = {"script": script, "variant": variant, "env_name": env.name, "args": asdict(args)}
    buffer = io.BytesIO()  # a full disk is then an OSError of `write_atomically`, not torch's RuntimeError
    torch.save(facts | content, buffer)
    write_atomically(run_dir / "checkpoint.pt", buffer.getbuffer())


def as_tensors(tree):
    """Numpy arrays in a tree of dicts as tensors, so that a checkpoint loads with weights_only=True."""
    if isinstance(tree, dict):
        return {key: as_tensors(value) for key, value in tree.items()}
    return torch.as_tensor(tree) if isinstance(tree, np.ndarray) else tree


def save_or_stop(due, stop, save):
    """Ends an update: save() if it is due or a stop was asked for, and then stop."""
    halt = bool(stop)  # read once: what was saved is what is left
    if due or halt:
        save()
    if halt:
        raise KeyboardInterrupt


def add_to_sums(sums, info, number):
    """Sums of what is averaged between two rows; a non-finite value ends the run, its checkpoint stays."""
    for key, value in info.items():
        if not math.isfinite(value):
            raise UsageError(f"update {number}: {key} is {float(value)}; "
                             "the last checkpoint is intact, try other step sizes")
        total, count = sums.get(key, (0.0, 0))
        sums[key] = (total + float(value), count + 1)


def log_row(args, run, row, run_dir, bar, shown):
    """Adds `row` and the means since the last one to the run, and writes metrics.csv anew; what did not occur
    between two rows is left empty there."""
    row |= {key: total / count for key, (total, count) in sorted(run["sums"].items())}
    row = {key: value if isinstance(value, int) else float(value) for key, value in row.items()}
    run["rows"].append(row)
    run["sums"] = {}
    columns = list(dict.fromkeys(key for row in run["rows"] for key in row))
    cells = [[format(row[key], "d" if isinstance(row[key], int) else ".6g") if key in row else ""
              for key in columns] for row in run["rows"]]
    write_atomically(run_dir / "metrics.csv", ("\n".join(map(",".join, [columns, *cells])) + "\n").encode())
    for key, value in row.items() if args.tensorboard else ():
        tensorboard_writer(run_dir).add_scalar(key, value, row["env_steps"])
    bar.set_postfix({key: format(row[f"eval/{key}"], ".2f") for key in shown if f"eval/{key}" in row})


@lru_cache(maxsize=1)
def tensorboard_writer(run_dir):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("--tensorboard needs the package tensorboard; "
                         "pip install tensorboard, or drop the flag") from None
    return SummaryWriter(run_dir)


# ---------------------------------------------------------------- scores and pictures of phi, any environment
def rank_correlation(phi, env):
    """Spearman correlation of ||phi(s) - phi(s')|| with true distance, from s0 and of all pairs; phi [S, d].

    Above 1000 states it takes 500,000 random pairs, always the same. Empty where no true distances are known.
    """
    if len(phi) > 1000:
        first, second = np.random.default_rng(0).integers(len(phi), size=(2, 500_000))
    else:
        first, second = np.triu_indices(len(phi), 1)
    distance = np.linalg.norm(phi[first] - phi[second], axis=-1)
    if env.distance is None:
        return {"eval/extent": distance.max()}
    from_start = np.linalg.norm(phi - phi[env.start_index], axis=-1)
    return {
        "eval/spearman_all": scipy.stats.spearmanr(distance, env.distance[first, second]).statistic,
        "eval/spearman_s0": scipy.stats.spearmanr(from_start, env.distance[env.start_index]).statistic,
        "eval/extent": distance.max(),
    }


def coverage(run, env):
    """Scores of run["visits"], visits of each cell since it was set to 0; run["ever"]: cells visited before.

    far: share of the visits to the furthest fifth of the cells.
    """
    visits = run["visits"].numpy()
    run["ever"] |= run["visits"] > 0
    row = {"eval/coverage_total": run["ever"].float().mean()}
    if visits.any():
        row["eval/coverage"] = (visits > 0).mean()
        if hasattr(env, "cell_distance"):
            far = env.cell_distance >= np.quantile(env.cell_distance, 0.8)
            row["eval/far"] = visits[far].sum() / visits.sum()
    if hasattr(env, "diverged"):
        row["rollout/diverged"] = env.diverged
    return row


def mark_ends(ax, env, points):
    """s0 red and the goal green; points [S, 2] of the states."""
    for index, colour, label in ((getattr(env, "goal_index", None), "limegreen", "goal"),
                                 (env.start_index, "red", "start s0")):
        if index is not None:
            ax.plot(*points[index], "o", color=colour, markersize=6, zorder=3, label=label)


def draw_truth(ax, env):
    """The states whose phi is drawn, in the same colours: the maze, or a scatter of any other environment."""
    if hasattr(env, "draw"):
        env.draw(ax)
    else:
        ax.scatter(*env.truth_xy.T, c=truth_colours(env), s=8)
        mark_ends(ax, env, env.truth_xy)
    ax.set_title(TITLES.get(env.name, env.name), fontsize=9)


def truth_colours(env):
    """Distance from s0 [S], or along the first coordinate where no true distances are known."""
    return env.truth_xy[:, 0] if env.distance is None else env.distance[env.start_index]


def draw_phi(ax, env, phi, title=None):
    """First two dimensions of phi [S, d], coloured by distance from s0; equal axes, s0 red, goal green."""
    phi = np.pad(phi, ((0, 0), (0, max(0, 2 - phi.shape[1]))))[:, :2]
    points = ax.scatter(*phi.T, c=truth_colours(env), s=8)
    mark_ends(ax, env, phi)
    ax.set(box_aspect=1, aspect="equal", adjustable="datalim")
    ax.tick_params(labelsize=7)
    ax.set_title(title, fontsize=9)
    return points


def draw_representation(path, env, phi, score):
    """The maze and phi [S, d] side by side in the same colours; `score` is the title."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_truth(left, env)
    points = draw_phi(right, env, phi, "phi")
    figure.colorbar(points, ax=right, label="x" if env.distance is None else "distance from s0")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(score, fontsize=9)
    figure.savefig(path, dpi=110)


def draw_phis(path, rows, across=False):
    """The maze and pictures of phi for each (env, [(title, phi [S, d])]): a row, or `across` a column."""
    shape = len(rows), 1 + max(len(entries) for _, entries in rows)
    height, width = shape[::-1] if across else shape
    figure = Figure(figsize=(2.3 * width, 2.4 * height), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False)
    for axes, (env, entries) in zip(grid.T if across else grid, rows):
        draw_truth(axes[0], env)
        for ax in axes[1 + len(entries):]:
            ax.axis("off")
        for ax, (title, phi) in zip(axes[1:], entries):
            draw_phi(ax, env, phi, title)
    figure.savefig(path, dpi=90)


def draw_traces(path, env, values, traces, titles):
    """One maze per skill: values [skills, S] as colours, or None: distance; traces [skills, starts, T, 2]."""
    columns = -(-len(titles) // 2)
    figure = Figure(figsize=(3 * columns, 6.4), layout="constrained")
    for ax, value, paths, title in zip(
            figure.subplots(2, columns, squeeze=False).ravel(), values, traces, titles):
        env.draw(ax, value)
        for xy in paths:
            ax.plot(*xy.T, color="tab:red", lw=1)
            ax.plot(*xy[-1], "o", color="tab:orange", ms=3)
        ax.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)


CURVES = ("rollout/skill_reward", "rollout/high_return", "rollout/fallen", "loss/attract", "loss/boredom")


def draw_curves(path, runs):
    """Scores, rewards and losses over environment steps; runs {label: [metrics.csv rows of each seed]}.

    A colour per label, a thin line per seed, and their mean.
    """
    found = dict.fromkeys(key for seeds in runs.values() for seed in seeds for row in seed for key in row)
    names = [name for name in found if name.startswith("eval/") or name in CURVES]
    if not names:
        raise UsageError("the runs have logged nothing that is drawn; train longer")
    rows = -(-len(names) // 4)
    figure = Figure(figsize=(13, 2.3 * rows + 0.7), layout="constrained")
    for place, name in enumerate(names, 1):
        ax = figure.add_subplot(rows, 4, place)
        for colour, seeds in enumerate(runs.values()):
            curves = [[(row["env_steps"], row[name]) for row in seed if name in row] for seed in seeds]
            curves = [np.array(curve) for curve in curves if curve]
            for curve in curves:
                ax.plot(*curve.T, color=f"C{colour}", lw=0.8, alpha=0.6)
            if curves:
                length = min(map(len, curves))
                ax.plot(*np.mean([curve[:length] for curve in curves], axis=0).T, color=f"C{colour}")
        ax.set_title(name, fontsize=8)
        ax.tick_params(labelsize=6)
        ax.grid(alpha=0.3)
    lines = [matplotlib.lines.Line2D([], [], color=f"C{colour}") for colour in range(len(runs))]
    figure.legend(lines, runs, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=90)


def write_representation(run_dir, env, phi, run, label):
    """phi.npz, its pictures and curves of a run; phi [S, d] of the truth states. Prints the last scores."""
    snapshots = {update: array.numpy() for update, array in run["snapshots"].items()}
    arrays = dict(xy=env.truth_xy, phi=phi, start=env.start_index, stages=list(snapshots),
                  snapshots=list(snapshots.values()))
    if env.distance is not None:
        arrays["distance"] = env.distance[env.start_index]
    np.savez_compressed(run_dir / "phi.npz", **arrays)
    last = run["rows"][-1]
    scores = ", ".join(f"{key.removeprefix('eval/')} {value:.3f}" for key, value in last.items()
                       if key.startswith("eval/"))
    draw_representation(run_dir / "representation.png", env, phi, scores)
    draw_phis(run_dir / "progress.png", [(env, [(f"update {k}", phi) for k, phi in snapshots.items()])])
    draw_curves(run_dir / "curves.png", {label: [run["rows"]]})
    print(f"{scores}\n{last['update'] / run['seconds']:,.1f} updates per second, "
          f"{run['seconds'] / 60:.1f} minutes")
    print("pictures: " + ", ".join(sorted(str(path) for path in run_dir.glob("*.png"))))


# ------------------------------------------------------------------------------------------------------- main
@dataclass
class Args:
    maze: str = "all"
    """umaze, tmaze, 4rooms, a maze text file, or all three built-in mazes"""
    picture: str = "gridworlds.png"
    """where the drawing goes"""


def main(args):
    names, path = list(MAZES) if args.maze == "all" else [args.maze], picture_path(args.picture)
    envs = [GridWorldVec(name) for name in names]
    figure = Figure(figsize=(4.5 * len(envs), 4), layout="constrained")
    for ax, env in zip(figure.subplots(1, len(envs), squeeze=False)[0], envs):
        draw_truth(ax, env)
        from_start = env.distance[env.start_index]
        goal = "no goal" if env.goal_index is None else f"goal {from_start[env.goal_index]:.0f} steps away"
        print(f"{env.name}: {env.num_states} states, furthest {from_start.max():.0f} steps from s0, {goal}")
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(Args)))

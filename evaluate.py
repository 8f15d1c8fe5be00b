"""Evaluations of what the scripts learn (Erraqabi et al., UAI 2022): result rows, tables and figures.

    python evaluate.py prediction --run runs/tatc/umaze/default/seed0  # linear critic on phi (Section 4.1.2)
    python evaluate.py control --run runs/tatc/umaze/default/seed0     # actor, critic on phi (Section 4.1.2)
    python evaluate.py shaping --run runs/tatc/antmaze1/default/seed0  # SAC on distances in phi (4.2.1)
    python evaluate.py skills --run runs/tatc/antmaze1/default/seed0   # frozen skills, sparse task (4.2.2)
    python evaluate.py scores --runs runs/tatc/umaze/default/seed*     # scores of trainings and policies
    python evaluate.py curves --runs runs/tatc/umaze/*/seed*           # one picture of several trainings
    python evaluate.py film --run runs/tatc/antmaze1/default/seed0     # an ant under the trained policies
    python evaluate.py speed                                           # training loop and SAC against peers
    python evaluate.py plan                                            # every command behind the results
    python evaluate.py figures                                         # figures and tables, from the rows

A result row is experiment, method, env, run_seed (of the training), seed (of the evaluation), step, metric,
value. Rows go to the run's own directory unless --results-dir says otherwise. Repeating a command replaces
its rows; several processes may write to one file at the same time.

Departures from the paper, which says neither how episodes start nor what "value approximation" measures:
E1  Episodes start at uniform states, at s0, or as in the non-uniform prior (where the last one ended, at s0
    with probability p_r or from the goal): one training for each.
E2  Value error is the root mean square over all states but the goal, against the optimal values V* and
    against the exact values of the current policy, V^pi (both without the time limit).
E3  phi is centred and divided by one number, so that its coordinates have mean variance 1: Adam's step size
    then means the same for every representation. Distances keep their proportions, and what is linear in phi
    stays linear.
E4  Shaping: SAC makes one update in eight environment steps (250,000 in 2 million steps; the paper, with one
    per step, 5 million), of 128 transitions, with Adam at 3e-4 (paper: 1e-4) that goes to 0 over the last
    30 % of a run, and the target critics follow at the paper's rate per environment step.
E5  Shaping: the critics learn what an action adds to staying where one is, (1 - gamma) Q(s, a) - r(s), where
    r(s) is the reward of arriving in s. Rewards, optimal policies and the actor's gradient are those of the
    paper's SAC.
E6  Shaping: an ant that falls on its back in training begins anew, and counts as staying there for ever; in
    evaluations it goes on.
"""

import csv
import importlib
import io
import itertools
import math
import re
import shlex
import sys
import time
import zipfile
from collections import deque, namedtuple
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, Optional

import filelock
import numpy as np
import scipy.stats
import torch
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from tqdm import tqdm

import antmaze
import baselines_dco_diayn as baselines
import gridworld
import laprep
import tatc
from gridworld import UsageError

COLUMNS = ("experiment", "method", "env", "run_seed", "seed", "step", "metric", "value")
NAMES = {"tatc": "TATC", "laprep": "Lap-rep", "dco": "DCO", "diayn": "DIAYN"}
RANGES = dict(
    seed=(0, 2**31), dim=(1, 10**4), updates=(1, 10**8), episodes=(1, 10**7), horizon=(1, 10**6),
    gamma=(0.001, 0.9999), entropy_coef=(0, 1e6), learning_rate=(0, 1), hidden=(1, 4096),
    log_every=(1, 10**8), steps=(1, 10**9), num_envs=(1, 4096), warmup=(1, 10**9), update_ratio=(0, 100),
    batch_size=(1, 10**6), reward_factor=(1e-9, 1e9), alpha=(0, 1e6), tau=(1e-9, 1), anneal=(0, 1),
    eval_every=(1, 10**9), eval_episodes=(1, 4096), batch=(1, 4096), skill_length=(1, 10**6),
    rollouts=(1, 4096),
)


# ------------------------------------------------------------------------------------------------ result rows
def read_results(path):
    """The rows of a results file as dicts of strings; none if there is no file."""
    if not path.exists():
        return []
    reader = csv.DictReader(io.StringIO(gridworld.read_text(path, 10**9), newline=""))
    rows = []
    try:
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError
        for row in reader:
            int(row["run_seed"]), int(row["seed"]), int(row["step"])
            if None in row or not math.isfinite(float(row["value"])):
                raise ValueError
            rows.append(row)
    except (csv.Error, TypeError, ValueError):
        raise UsageError(f"{path} is not a results file, line {reader.line_num}: not {len(COLUMNS)} fields, "
                         "or no numbers where they belong; mend or delete the line") from None
    return rows


def key_of(row):
    return tuple(row[name] for name in COLUMNS[:5])


def add_results(path, rows):
    """Add rows (tuples in the order of COLUMNS), replacing those of one experiment, method, env and seeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = [dict(zip(COLUMNS, (*map(str, row[:-1]), format(row[-1], ".6g")))) for row in rows]
    replaced = set(map(key_of, new))
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        kept = [row for row in read_results(path) if key_of(row) not in replaced]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept + new, key=key_of))  # a stable sort: steps stay in order within a key
        gridworld.write_atomically(path, text.getvalue().encode())


def add_variant(method, variant):
    return method if variant == "default" else f"{method} {variant}"


def own_variant(args):
    """Every argument of an evaluation that differs from its default, but for what says what is evaluated."""
    chosen = {name: getattr(args, name) for name in ("run", "features", "starts", "reward", "floor")
              if hasattr(args, name)}
    return gridworld.variant_name(args, type(args)(**chosen))


def begin(args, title, file, facts, env, experiments, last_step):
    """(path, key): where the rows go, and their method, env, run_seed and seed; key is None if --resume finds
    rows of all the experiments up to last_step there. The path is checked before hours are spent."""
    method = add_variant(facts["method"], own_variant(args))
    key = method, env.name, facts["run_seed"], args.seed
    run = Path(args.run or "runs/evaluations")
    path = Path(args.results_dir or (run.parent if run.is_file() else run)) / f"{file}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {key_of(row) for row in read_results(path) if int(row["step"]) >= last_step}
    gridworld.write_atomically(path.with_name(f".{file}.check"), b"")
    path.with_name(f".{file}.check").unlink()
    print(f"{title} of {method} on {env.name}, run {facts['run_seed']}, seed {args.seed}, rows to {path}")
    if args.resume and all((experiment, *map(str, key)) in done for experiment in experiments):
        print("finished already")
        return path, None
    return path, key


# ----------------------------------------------------------------------------- what a run left, by its script
def load_facts(path):
    """The checkpoint of a run of any script, with its method's name in the rows."""
    facts = gridworld.load_checkpoint(path, tuple(NAMES))
    return facts | {"method": add_variant(NAMES[facts["script"]], facts["variant"]),
                    "run_seed": facts["args"]["seed"]}


def load_rows(path):
    """(facts, rows of metrics.csv) of a run directory."""
    facts = load_facts(path)
    rows = facts.get("rows")
    needed = {"update", "env_steps", "seconds"}
    if not isinstance(rows, list) or not rows or not all(needed <= set(row) for row in rows):
        raise UsageError(f"{path} holds no logged rows; give a run directory that has logged")
    return facts, rows


def load_phi(path, num_envs=1, seed=0):
    """(facts, env, phi) of a run of tatc.py or laprep.py; phi takes obs [n, ...] and gives [n, d]."""
    facts = load_facts(path)
    if facts["script"] == "laprep":
        _, env, phi = laprep.load(path, num_envs, seed)
        return facts, env, phi
    if facts["script"] != "tatc":
        raise UsageError(f"{path} has no phi; give a run of tatc.py or laprep.py")
    _, env, networks, _ = tatc.load(path, num_envs, seed)
    return facts, env, lambda obs: networks["phi"](torch.as_tensor(obs)).detach().numpy()


# act(obs, skill [n]) -> actions; ended(obs, skill [n]) -> [n] bool
Skills = namedtuple("Skills", "count act ended")


def never_ended(obs, skill):
    return np.zeros(len(obs), dtype=bool)


def load_skills(path, num_envs, seed, rng, option_ends=True):
    """(facts, env, Skills, pi_hi or None) of a run of tatc.py or baselines_dco_diayn.py."""
    facts = load_facts(path)
    if facts["script"] == "tatc":
        args, env, networks, omega = tatc.load(path, num_envs, seed)
        act = tatc.make_actor(networks["pi_low"], omega, env.action_shape, rng)
        return facts, env, Skills(len(omega), act, never_ended), networks["pi_hi"]
    if facts["script"] == "laprep":
        raise UsageError(f"{path} has no skills; give a run of tatc.py or baselines_dco_diayn.py")
    args, env, skills = baselines.load(path, num_envs, seed)
    return facts, env, Skills(args.num_skills, lambda obs, skill: skills.act(obs, skill, rng),
                              skills.ended if option_ends else never_ended), None


def need_goal(env, kind, command):
    """Refuses an environment of another kind than the command is for, and one without a goal."""
    if not isinstance(env, kind):
        which = "gridworlds" if kind is gridworld.GridWorldVec else "ant mazes"
        raise UsageError(f"{command} is an evaluation on {which}, this is {env.name}")
    if env.goal_index is None:
        raise UsageError(f"{env.name} has no goal; mark one cell with G")


# ========================================================================== prediction and control: the agent
def make_agent(args, env, features):
    """(agent, its parameters) on features [S, d]; agent() gives logits and value of every state, [S, 5].

    control: MLP 2x64 tanh on the features with an action head and a linear critic head. prediction: the actor
    is that MLP on the one-hot state, the critic linear in the features.
    """
    features, size = torch.as_tensor(features, dtype=torch.float32), features.shape[1]
    if isinstance(args, Control):
        both = tatc.Net(size, 0, 5, 64, np.ones(size, np.float32))
        return partial(both, features), both.parameters()
    actor, states = tatc.Net(env.num_states, 0, 4, 64), torch.arange(env.num_states)
    weight, bias = torch.zeros(size, requires_grad=True), torch.zeros((), requires_grad=True)
    return (lambda: torch.column_stack([actor(states), features @ weight + bias]),
            [*actor.parameters(), weight, bias])


def start_states(env, start, last, reset_prob, rng):
    """Starts [episodes]: "uniform" (not the goal), "s0", or "prior": at `last`, where episodes ended."""
    if start == "uniform":
        state = rng.integers(env.num_states - 1, size=len(last))
        return state + (state >= env.goal_index)
    if start == "s0":
        return np.full(len(last), env.start_index)
    return np.where((rng.random(len(last)) < reset_prob) | (last == env.goal_index), env.start_index, last)


def goal_episodes(env, policy, state, horizon, gamma, rng):
    """Episodes of the goal task under policy [S, 4] from state [episodes]: reward 1 at the goal, the end.

    Returns visits [S, 4], the summed Monte-Carlo returns [S, 4] of these visits, the sum of squared returns,
    the episodes' rewards, and where they ended. The sums are all that the loss needs: no network sees a state
    twice.
    """
    cumulative = np.cumsum(policy, axis=1)[:, :3]
    next_state = env.next_state.copy()
    next_state[env.goal_index] = env.goal_index  # absorbing: the steps after the end are cut below
    pairs = np.empty((horizon, len(state)), dtype=np.int64)
    uniform = rng.random((horizon, len(state)))
    for t in range(horizon):
        action = (uniform[t][:, None] > cumulative[state]).sum(1)
        pairs[t] = 4 * state + action
        state = next_state[state, action]
    alive = pairs // 4 != env.goal_index
    length = alive.sum(0)
    reward = (state == env.goal_index).astype(np.float64)
    left = np.maximum(length - 1.0 - np.arange(horizon)[:, None], 0)  # steps to the end, [horizon, episodes]
    returns = reward * gamma**left
    pairs, returns = pairs[alive], returns[alive]
    visits = np.bincount(pairs, minlength=4 * env.num_states).reshape(-1, 4)
    summed = np.bincount(pairs, weights=returns, minlength=4 * env.num_states).reshape(-1, 4)
    return visits, summed, np.square(returns).sum(), reward, state


def goal_task_loss(logits, value, visits, returns, squares, entropy_coef):
    """A2C with Monte-Carlo returns, means over all visits.

    logits, visits, returns (summed) [S, 4], value [S], squares = sum G^2: the sum over visits of
    log pi (G - V) is sum_{s, a} log pi(a|s) (returns_sa - visits_sa V(s)), likewise for the squared error.
    """
    count = visits.sum()
    log_pi = F.log_softmax(logits, dim=-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    policy_loss = -(log_pi * (returns - visits * value.detach()[:, None])).sum() / count
    policy_loss = policy_loss - entropy_coef * (visits.sum(1) * entropy).sum() / count
    value_loss = ((visits.sum(1) * value.square() - 2 * returns.sum(1) * value).sum() + squares) / count
    return policy_loss + value_loss


def standardise(features):
    """E3: features [S, d] centred, and scaled by one number to mean variance 1."""
    centred = features - features.mean(0)
    return centred / max(np.sqrt(centred.var(0).mean()), 1e-12)


@dataclass
class Prediction:
    """How well a linear critic on frozen phi approximates values while an actor on one-hot states learns."""

    run: Optional[str] = None
    """run directory or checkpoint of tatc.py or laprep.py on a gridworld"""
    features: Optional[Literal["exact", "onehot"]] = None
    """instead of --run: the first --dim exact eigenvectors of the Laplacian, the constant one included, or
    the one-hot code"""
    env: str = "umaze"
    """with --features: umaze, tmaze, 4rooms or a maze text file"""
    dim: int = 2
    """d of --features exact"""
    seed: int = 0
    """seed of the agent and its episodes"""
    starts: tuple[Literal["uniform", "s0", "prior"], ...] = ("uniform", "prior")
    """where episodes start; one training for each (E1); from s0 alone nobody finds the goal"""
    updates: int = 3000
    """A2C updates of 80 episodes"""
    horizon: int = 100
    """steps per episode"""
    gamma: float = 0.98
    """discount"""
    entropy_coef: float = 0.01
    """entropy coefficient"""
    learning_rate: float = 1e-3
    """Adam step size"""
    log_every: int = 50
    """updates between two result rows"""
    resume: bool = False
    """do nothing if the results file has the rows of this command already"""
    results_dir: Optional[str] = None
    """directory for the rows; default: beside the run"""


@dataclass
class Control(Prediction):
    """How well an actor-critic on frozen phi learns the goal task."""


def train_agent(args, env, features, start):
    """A2C on the goal task; yields (update, metric, value) every log_every updates."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    agent, parameters = make_agent(args, env, features)
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, fused=True)
    reset_prob = tatc.DEFAULTS.get(env.name, tatc.DEFAULTS["indices"])["reset_prob"]
    others = np.arange(env.num_states) != env.goal_index
    rewards, last = [], np.full(80, env.start_index)
    for number in tqdm(range(1, args.updates + 1), desc=f"from {start}", unit="update", dynamic_ncols=True,
                       leave=False):
        logits, value = agent().tensor_split((4,), dim=1)
        value = value[:, 0]
        policy = F.softmax(logits.detach().double(), dim=-1).numpy()
        state = start_states(env, start, last, reset_prob, rng)
        visits, returns, squares, reward, last = goal_episodes(
            env, policy, state, args.horizon, args.gamma, rng)
        rewards.append(reward.mean())
        if number % args.log_every == 0 or number == args.updates:
            yield number, "reward", np.mean(rewards)
            for metric, truth in (("error_optimal", env.optimal_values(args.gamma)),
                                  ("error_policy", env.policy_values(policy, args.gamma))):
                error = (value.detach().double().numpy() - truth)[others]
                yield number, metric, np.sqrt(np.square(error).mean())
            rewards = []
        loss = goal_task_loss(logits, value, torch.as_tensor(visits, dtype=torch.float32),
                              torch.as_tensor(returns, dtype=torch.float32), float(squares),
                              args.entropy_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate_agent(args):
    command = "control" if isinstance(args, Control) else "prediction"
    if (args.run is None) == (args.features is None):
        raise UsageError("give either --run RUN_DIR or --features")
    if not args.starts:
        raise UsageError("--starts is empty; give uniform, s0 or prior")
    if args.run is not None:
        facts, env, phi = load_phi(args.run)
    else:
        method = "one-hot" if args.features == "onehot" else "exact eigenvectors"
        facts, env = {"method": method, "run_seed": args.seed}, antmaze.make_env(args.env, 1, 0)
    need_goal(env, gridworld.GridWorldVec, command)
    if args.features is None:
        features = phi(env.truth_obs)
    elif args.features == "onehot":
        features = np.eye(env.num_states)
    elif args.dim <= env.num_states:
        features = env.laplacian_eigenvectors(args.dim)[1]
    else:
        raise UsageError(f"--dim is {args.dim}; use at most {env.num_states}, "
                         f"the number of states of {args.env}")
    path, key = begin(args, command, f"gridworld_{command}", facts, env,
                      [f"{command}-{start}" for start in args.starts], args.updates)
    if key is None:
        return
    if args.features != "onehot":
        features = standardise(features)
    rows = []
    for start in args.starts:
        logged = list(train_agent(args, env, features, start))
        rows += [(f"{command}-{start}", *key, *entry) for entry in logged]
        print(f"from {start}: " + ", ".join(f"{metric} {value:.3f}" for _, metric, value in logged[-3:]))
    add_results(path, rows)


# ======================================================================== scores of trained runs and policies
@dataclass
class Scores:
    """Scores that runs logged while training, and on the ants of what their policies can do, as rows."""

    runs: tuple[str, ...]
    """run directories"""
    results_dir: Optional[str] = None
    """directory for the rows, phi.npz and a small checkpoint; default: rows beside each run, no copies"""


def explore(path, seed, rng, steps):
    """64 ants under pi_hi and its skills from s0 -> (facts, states [steps + 1, 64, 29], distances
    [steps + 1, 64] to the state that is furthest from s0)."""
    facts, env, skills, pi_hi = load_skills(path, 64, seed, rng)
    if pi_hi is None or not isinstance(env, antmaze.AntMazeVec):
        raise UsageError(f"{path} is not a run of tatc.py on an ant maze")
    walk = run_skills(env, skills, lambda t, ants, obs, allowed: tatc.choose_skills(pi_hi, obs, rng), steps,
                      facts["args"]["skill_length"])
    states = np.stack([env.obs, *walk])
    far_end = env.truth_xy[env.distance[env.start_index].argmax()]
    return facts, states, np.linalg.norm(states[..., :2] - far_end, axis=-1)


def policy_scores(path):
    """What trained policies of tatc.py on an ant maze can do without a task -> {metric: value}.

    travel: share of the maze's positional states from which some skill ends 3 units away or more after c
    steps; distance: mean over these states of how far the best skill gets; reaches_end, reaches_end_1500:
    share of 64 tries of pi_hi from s0 that come within 4 units of the far end in 1000 and 1500 steps; fallen:
    share on their back after 1000 steps.
    """
    rng = np.random.default_rng(0)
    args, env, networks, omega = tatc.load(path)
    policy = partial(tatc.skill_policy, networks["pi_low"], omega, env.action_shape)
    traces = env.skill_traces(policy, len(omega), env.truth_obs, args.skill_length)
    distance = np.linalg.norm(traces[:, :, -1] - traces[:, :, 0], axis=-1).max(0)  # [S]
    _, states, to_end = explore(path, 0, rng, 1500)
    return {"travel": (distance >= 3).mean(), "distance": distance.mean(),
            "reaches_end": (to_end[1:1001] <= 4).any(0).mean(),
            "reaches_end_1500": (to_end[1:] <= 4).any(0).mean(),
            "fallen": antmaze.on_back(states[1000]).mean()}


def collect_scores(args):
    """Rows whose step is the number of environment steps; of several with one step, as offline, the last."""
    if not args.runs:
        raise UsageError("--runs is empty; give run directories")
    for run in map(Path, args.runs):
        facts, logged = load_rows(run)
        ant = isinstance(antmaze.make_env(facts["args"]["env"], 1, 0), antmaze.AntMazeVec)
        key, last = ("training", facts["method"], facts["env_name"], facts["run_seed"], 0), logged[-1]
        kept = {row["env_steps"]: row for row in logged
                if row["update"] % (100 if ant else 500) == 0 or row is last}
        rows = [(*key, step, name.removeprefix("eval/"), value) for step, row in kept.items()
                for name, value in row.items() if name.startswith("eval/")]
        scores = {name: last[name] for name in ("update", "seconds")}
        if ant and facts["script"] == "tatc":
            print(f"{run}: scores of its policies (a minute)", flush=True)
            scores |= policy_scores(run)
        rows += [(*key, last["env_steps"], *entry) for entry in scores.items()]
        folder = Path(args.results_dir or run)
        add_results(folder / f"{'antmaze' if ant else 'gridworld'}_training.csv", rows)
        if args.results_dir:
            copy_run(run, facts, folder, ant)
        print(f"{run}: {len(rows)} rows")


def copy_run(run, facts, folder, with_networks):
    """What using a trained phi takes, and with_networks its skills: folder/phi/*.npz, checkpoints/*.pt."""
    name = f"{facts['script']}-{facts['env_name']}-{facts['variant']}-seed{facts['run_seed']}"
    copies = {}
    if (run / "phi.npz").exists():
        copies[folder / "phi" / f"{name}.npz"] = (run / "phi.npz").read_bytes()
    if with_networks:
        buffer, kept = io.BytesIO(), ("script", "variant", "env_name", "args", "update", "networks", "duals",
                                      "threshold")
        torch.save({key: facts[key] for key in kept if key in facts}, buffer)
        copies[folder / "checkpoints" / f"{name}.pt"] = buffer.getvalue()
    for path, content in copies.items():
        path.parent.mkdir(exist_ok=True)
        gridworld.write_atomically(path, content)


@dataclass
class Curves:
    """Draw the metrics of several trainings: a colour per variant, a line per seed, the mean thick."""

    runs: tuple[str, ...]
    """run directories"""
    path: str = "curves.png"
    """where the picture goes"""


def draw_curves(args):
    runs = {}
    for run in args.runs:
        facts, rows = load_rows(run)
        runs.setdefault(f"{facts['method']}, {facts['env_name']}", []).append(rows)
    if not runs:
        raise UsageError("--runs is empty; give run directories")
    gridworld.draw_curves(gridworld.picture_path(args.path), runs)
    print(f"picture: {args.path}")


# =========================================================================== shaping: SAC on distances in phi
# What the paper leaves open: observations are scaled by antmaze's fixed constants; all ants end their
# episodes together; one whose physics diverged goes on from s0, and that step is not learned from.
@dataclass
class Shaping:
    """SAC on batched ants, rewarded by the distance to the goal in phi (or in the plane, or by success)."""

    run: Optional[str] = None
    """run directory or checkpoint of tatc.py or laprep.py on an ant maze; not for --reward sparse, xy and
    fiedler"""
    reward: Literal["dense", "mix", "sparse", "xy", "fiedler"] = "dense"
    """dense -||phi(s') - phi(g)||, mix half dense half sparse, sparse 1 within epsilon = 2 of the goal, xy
    -||xy' - g||, fiedler: dense on the maze's exact second eigenfunction"""
    reward_factor: float = 1.0
    """times the rule: the reward spans 10 over the maze's positions; for mix twice the factor of dense"""
    env: str = "antmaze1"
    """without --run: antmaze1, antmaze2, antmaze-large or ant:FILE"""
    seed: int = 0
    """seed of the agent and its ants"""
    steps: int = 2_000_000
    """environment steps (paper: 5 million)"""
    num_envs: int = 32
    """ants side by side"""
    horizon: int = 1000
    """steps per episode; the end is a truncation, values are bootstrapped there"""
    end_on_fall: bool = True
    """an ant that falls on its back in training begins anew, and counts as staying there for ever (E6)"""
    warmup: int = 10_000
    """environment steps with uniform actions before the first update"""
    update_ratio: float = 0.125
    """updates per environment step"""
    batch_size: int = 128
    """transitions per update"""
    hidden: int = 128
    """units in each of the two hidden layers"""
    gamma: float = 0.99
    """discount"""
    alpha: float = 0.1
    """entropy coefficient"""
    tau: float = 0.005
    """step of the target critics per environment step: an update makes up for the steps since the last"""
    learning_rate: float = 3e-4
    """Adam step size (paper: 1e-4)"""
    anneal: float = 0.3
    """share of the steps, the last ones, over which the Adam step size goes linearly to 0 (paper: 0)"""
    eval_every: int = 50_000
    """environment steps between two evaluations"""
    eval_episodes: int = 16
    """episodes per evaluation, side by side"""
    run_dir: Optional[str] = None
    """where the checkpoint goes; default runs/shaping/<env>/<method>/seed<seed>"""
    resume: bool = False
    """continue from the checkpoint in the run directory, or start if there is none"""
    results_dir: Optional[str] = None
    """directory for the rows; default: beside the run"""


def within_goal(obs, env):
    """obs [N, 29] -> [N] bool: within epsilon of the goal, in the plane."""
    return np.linalg.norm(obs[:, :2] - env.goal_xy, axis=1) <= antmaze.GOAL_RADIUS


def make_reward(kind, env, phi):
    """reward(next_obs [N, 29]) -> [N] float32, times the factor of Shaping.reward_factor's rule."""
    if kind == "xy":
        phi = lambda obs: obs[:, :2].astype(np.float64)  # noqa: E731
    if kind == "fiedler":
        values = env.laplacian_eigenvectors(2)[1][:, 1:].astype(np.float32)
        phi = lambda obs: values[  # noqa: E731  of the nearest positional state
            ((obs[:, None, :2] - env.truth_xy) ** 2).sum(-1).argmin(1)]
    phi_goal = None if phi is None else phi(env.truth_obs[[env.goal_index]])

    def dense(obs):
        return -np.linalg.norm(phi(obs) - phi_goal, axis=1)

    def plain(obs):
        if kind == "sparse":
            return within_goal(obs, env)
        return 0.5 * dense(obs) + 0.5 * within_goal(obs, env) if kind == "mix" else dense(obs)

    span = np.ptp((dense if kind == "mix" else plain)(env.truth_obs).astype(float))
    if not 1e-6 < span < np.inf:
        raise UsageError(f"the distances to the goal span {span:.3g} over the maze: "
                         "phi has collapsed or is damaged")
    factor = (20 if kind == "mix" else 10) / span
    return lambda obs: (factor * plain(obs)).astype(np.float32)


class Mlps(nn.Module):
    """Networks with two hidden ReLU layers in batched products: x [n, inputs] -> [copies, n, outputs]."""

    def __init__(self, copies, inputs, outputs, hidden):
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in ((inputs, hidden), (hidden, hidden), (hidden, outputs)):
            bound = fan_in**-0.5  # torch's own default for a linear layer
            self.weights.append(torch.empty(copies, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(copies, 1, fan_out).uniform_(-bound, bound))

    def forward(self, x):
        x = x.expand(len(self.weights[0]), -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            x = torch.baddbmm(bias, F.relu(x) if i else x, weight)
        return x


def sac_target(progress, terminated, next_values, next_log_prob, gamma, alpha):
    """progress + gamma (min_i C_i(s', a') - alpha log pi(a'|s')), [n], next_values [2, n]; 0 follows an end.

    C is (1 - gamma) Q - r (E5). Q(s, a) = r(s') + gamma V(s') times 1 - gamma, minus r(s), is
    r(s') - r(s) + gamma C(s'): progress = r(s') - r(s) takes the reward's place. An ant on its back has
    V(s') = r(s') / (1 - gamma), so C(s') = 0.
    """
    return progress + gamma * (1 - terminated) * (next_values.amin(0) - alpha * next_log_prob)


def sac_update(args, networks, optimizers, batch):
    """One step of the twin critics, of the actor through the new critics, and of the target critics.

    batch: obs [n, 29] and next_obs times obs_scale, actions [n, 8], progress and terminated [n]. The critics
    are C of E5, so alpha is times 1 - gamma as well.
    """
    obs, actions, next_obs, progress, terminated = batch
    actor, critics, targets = networks["actor"], networks["critics"], networks["targets"]
    noise, next_noise = torch.randn(2, len(obs), 8)
    alpha = args.alpha * (1 - args.gamma)
    with torch.no_grad():
        next_actions, next_log_prob = baselines.squashed_gaussian(actor(next_obs)[0], next_noise)
        next_values = targets(torch.cat([next_obs, next_actions], dim=-1))[..., 0]
        target = sac_target(progress, terminated, next_values, next_log_prob, args.gamma, alpha)
    values = critics(torch.cat([obs, actions], dim=-1))[..., 0]  # [2, n]
    critic_loss = (values - target).square().mean(1).sum()
    optimizers["critics"].zero_grad()
    critic_loss.backward()
    optimizers["critics"].step()
    new_actions, log_prob = baselines.squashed_gaussian(actor(obs)[0], noise)
    actor_loss = (alpha * log_prob - critics(torch.cat([obs, new_actions], dim=-1))[..., 0].amin(0)).mean()
    optimizers["actor"].zero_grad()
    actor_loss.backward(inputs=list(actor.parameters()))  # the critics' own gradients are not needed
    optimizers["actor"].step()
    baselines.polyak(targets, critics, 1 - (1 - args.tau) ** (1 / args.update_ratio))


class Sac:
    """All that changes while SAC trains: networks, optimisers, replay, ants, counters; `step` moves all."""

    def __init__(self, args, env, reward):
        torch.manual_seed(args.seed)
        self.args, self.env, self.reward = args, env, reward
        self.rng = np.random.default_rng(args.seed)
        self.obs_scale = torch.tensor(env.obs_scale)
        self.networks = nn.ModuleDict({"actor": Mlps(1, 29, 16, args.hidden),
                                       "critics": Mlps(2, 37, 1, args.hidden),
                                       "targets": Mlps(2, 37, 1, args.hidden)})
        self.networks["targets"].load_state_dict(self.networks["critics"].state_dict())
        self.optimizers = {
            name: torch.optim.Adam(self.networks[name].parameters(), lr=args.learning_rate, fused=True)
            for name in ("actor", "critics")}
        self.replay = baselines.Replay(args.steps, (29, 8, 29, 1, 1))  # as in sac_update's batch
        self.moves, self.updates = 0, 0  # steps of all ants together; gradient steps
        self.logged = []  # [step, metric, value]

    @torch.no_grad()
    def act(self, obs, noise=0.0):
        """Torques [N, 8] at obs [N, 29]: deterministic, or sampled with standard normal noise [N, 8]."""
        return baselines.squashed_gaussian(self.networks["actor"](torch.as_tensor(obs) * self.obs_scale)[0],
                                           torch.as_tensor(noise))[0].numpy()

    def step(self):
        args, env, obs = self.args, self.env, self.env.obs
        if self.moves * args.num_envs < args.warmup:
            actions = self.rng.uniform(-1, 1, (args.num_envs, 8)).astype(np.float32)
        else:
            actions = self.act(obs, torch.randn(args.num_envs, 8))
        next_obs = env.move(actions)
        self.moves += 1
        before, after = args.reward_factor * self.reward(np.concatenate([obs, next_obs])).reshape(2, -1)
        terminated = env.fallen() & args.end_on_fall
        last = self.moves % args.horizon == 0
        good = ~env.last_diverged
        self.replay.add(obs[good], actions[good], next_obs[good], (after - before)[good], terminated[good])
        if last or terminated.any():
            env.place(terminated | last, "s0")
        left = max(0.0, 1 - self.moves * args.num_envs / args.steps)  # share of the steps
        for optimizer in self.optimizers.values() if args.anneal else ():
            optimizer.param_groups[0]["lr"] = args.learning_rate * min(1.0, left / args.anneal)
        due = int(args.update_ratio * (self.moves * args.num_envs - args.warmup)) - self.updates
        if due > 0:
            obs, actions, next_obs, progress, terminated = self.replay.sample(
                (due, args.batch_size), self.rng)
            for batch in zip(obs * self.obs_scale, actions, next_obs * self.obs_scale, progress[..., 0],
                             terminated[..., 0]):
                sac_update(args, self.networks, self.optimizers, batch)
            self.updates += due

    def state(self):
        return {"networks": self.networks.state_dict(), "update": self.moves, "updates": self.updates,
                "logged": self.logged,
                "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
                "rng": self.rng.bit_generator.state, "torch_rng": torch.get_rng_state(),
                "replay": torch.as_tensor(self.replay.rows[: self.replay.filled]),
                "position": self.replay.position, "env": gridworld.as_tensors(self.env.get_state())}

    def load(self, state):
        self.networks.load_state_dict(state["networks"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.moves, self.updates, self.logged = state["update"], state["updates"], state["logged"]
        self.rng.bit_generator.state = state["rng"]
        torch.set_rng_state(state["torch_rng"])
        self.env.set_state(state["env"])
        self.replay.load(state["replay"].numpy(), state["position"])


def judge_policy(env, act, horizon, seed):
    """One episode of each ant of env from s0 with actions act(obs) -> {metric: mean}."""
    env.reset(seed=seed)
    reached = np.zeros(env.num_envs, bool)
    for _ in range(horizon):
        env.move(act(env.obs))
        reached |= within_goal(env.obs, env)
    scores = {"success": reached, "success_at_end": within_goal(env.obs, env),
              "distance": env.geodesic(env.obs[:, :2], env.goal_xy), "fallen": env.fallen()}
    return {name: float(values.mean()) for name, values in scores.items()}


def evaluate_shaping(args):
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages: slower
    needs_phi = args.reward in ("dense", "mix")
    if needs_phi != (args.run is not None):
        how = "needs --run" if needs_phi else "uses no representation; drop --run"
        raise UsageError(f"--reward {args.reward} {how}")
    if needs_phi:
        facts, env, phi = load_phi(args.run, args.num_envs, args.seed)
    else:
        facts = {"method": args.reward, "run_seed": args.seed, "args": {"env": args.env}}
        env, phi = antmaze.make_env(args.env, args.num_envs, args.seed), None
    need_goal(env, antmaze.AntMazeVec, "shaping")
    reward, experiment = make_reward(args.reward, env, phi), f"shaping-{args.reward}"
    path, key = begin(args, f"shaping with {args.reward}", "antmaze_shaping", facts, env, [experiment],
                      args.steps)
    if key is None:
        return
    variant = f"{args.reward}-{key[0].replace(' ', '-')}-run{facts['run_seed']}"
    with gridworld.run_directory(
            args, env, variant, "shaping", ("run",)) as (run_dir, checkpoint), \
            gridworld.stop_requests() as stop:
        agent, judge = Sac(args, env, reward), antmaze.make_env(facts["args"]["env"], args.eval_episodes, 0)
        if checkpoint is not None:
            gridworld.load_state(run_dir, lambda: agent.load(checkpoint))
            add_results(path, [(experiment, *key, *entry) for entry in agent.logged])  # should they be lost
        moves, every = -(-args.steps // args.num_envs), max(1, args.eval_every // args.num_envs)
        bar = tqdm(range(agent.moves + 1, moves + 1), initial=agent.moves, total=moves, unit="move",
                   dynamic_ncols=True)
        for number in bar:
            agent.step()
            last = number == moves
            if last or number % every == 0:
                scores = judge_policy(judge, agent.act, args.horizon, args.seed + number)
                if not all(map(math.isfinite, scores.values())):
                    raise UsageError(f"after {number * args.num_envs} steps a score is not finite; "
                                     "try other step sizes")
                agent.logged += [[number * args.num_envs, *entry] for entry in scores.items()]
                bar.set_postfix({name: format(scores[name], ".2f") for name in ("success", "distance")})
                add_results(path, [(experiment, *key, *entry) for entry in agent.logged])
            gridworld.save_or_stop(last or number % (8 * every) == 0, stop, lambda: gridworld.save_checkpoint(
                run_dir, "shaping", variant, env, args, agent.state()))
    print(", ".join(f"{metric} {value:.3f}" for _, metric, value in agent.logged[-4:]))


# ====================================================================================== skills: a sparse task
# What the paper leaves open: returns are divided by the episode's length, so that the entropy coefficient
# has a meaning; the critic is a network of the policy's shape that also sees the time left. An ant on its
# back stays there until its episode ends. A DCO option can be chosen where it may start, or any where none
# may; it runs for one step at least.
@dataclass
class SkillsTask:
    """Do frozen skills solve the maze? A fresh high-level policy over them learns the sparse task."""

    run: Optional[str] = None
    """run directory or checkpoint of tatc.py or baselines_dco_diayn.py on an ant maze"""
    floor: Optional[Literal["actions", "skills", "choices"]] = None
    """random actions or eight skills of an untrained network in place of --run; choices: --run's skills,
    chosen at random"""
    env: str = "antmaze1"
    """without --run: antmaze1, antmaze2, antmaze-large or ant:FILE"""
    seed: int = 0
    """seed of the high level and its ants"""
    episodes: int = 1600
    """training episodes"""
    batch: int = 8
    """episodes per update, side by side"""
    horizon: int = 1000
    """steps per episode"""
    skill_length: int = 200
    """steps per choice of a skill"""
    option_ends: bool = True
    """DCO's options end, and may not start, where their f is low; without it they are skills like others"""
    learning_rate: float = 1e-3
    """RMSprop step size"""
    entropy_coef: float = 0.01
    """entropy coefficient of the high-level policy"""
    log_every: int = 10
    """updates between two result rows"""
    rollouts: int = 48
    """randomly chosen skills whose cells are counted"""
    resume: bool = False
    """do nothing if the results file has the rows of this command already"""
    results_dir: Optional[str] = None
    """directory for the rows; default: beside the run"""


def run_skills(env, skills, choose, steps, length):
    """Skills one after the other from where the ants are; yields obs [N, 29] after each step.

    choose(t, ants [m], obs [m, 29], allowed [m, k]) -> [m] is asked when a skill's `length` is over or its
    option has ended.
    """
    skill, left = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs, np.int64)
    for t in range(steps):
        ants = np.flatnonzero(left == 0)
        if len(ants):
            obs = env.obs[ants]
            allowed = ~np.stack([skills.ended(obs, np.full(len(ants), z)) for z in range(skills.count)],
                                axis=1)
            skill[ants], left[ants] = choose(t, ants, obs, allowed | ~allowed.any(1, keepdims=True)), length
        obs = env.move(skills.act(env.obs, skill))
        left -= 1
        left[skills.ended(obs, skill)] = 0
        yield obs


def random_choice(allowed, rng):
    """One of the skills allowed [m, k] for each of m ants, uniformly -> [m]."""
    return np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)


def covered_cells(env, skills, args, repeats, rng):
    """Mean share of the maze's cells that `rollouts` randomly chosen skills visit, over `repeats`.

    env has an ant for every skill of every repeat, each of which starts at s0; or an ant for every repeat,
    whose skills start where the last one ended, the first one at s0. A DCO option that ends is followed by
    another within its skill_length.
    """
    group = np.repeat(np.arange(repeats), env.num_envs // repeats)
    visited = np.zeros((repeats, env.num_cells), bool)
    visited[group, env.cell(env.obs)] = True
    steps = args.skill_length * args.rollouts * repeats // env.num_envs
    for obs in run_skills(env, skills, lambda t, ants, obs, allowed: random_choice(allowed, rng), steps,
                          args.skill_length):
        visited[group, env.cell(obs)] = True
    return visited.mean()


def choice_loss(logits, allowed, choice, value, returns, entropy_coef):
    """A2C with Monte-Carlo returns [n]: logits and allowed [n, k], choice [n], value [n] of the critic."""
    log_pi = F.log_softmax(logits.masked_fill(~allowed, -1e9), dim=-1)
    log_prob, entropy = log_pi.gather(1, choice[:, None]).squeeze(1), -(log_pi.exp() * log_pi).sum(1)
    policy_loss = -(log_prob * (returns - value.detach())).mean() - entropy_coef * entropy.mean()
    return policy_loss + (returns - value).square().mean()


def high_level_episodes(args, env, skills, policy, rng):
    """One episode of each ant from s0 -> (choices, rewards [T, N]); policy None chooses at random.

    choices: obs [n, 29], allowed [n, k], choice [n], time left [n, 1] as a share, and return to go [n] as a
    share of horizon.
    """
    env.place(np.ones(env.num_envs, bool), "s0")
    asked = []

    def choose(t, ants, obs, allowed):
        if policy is None:
            choice = random_choice(allowed, rng)
        else:
            with torch.no_grad():
                logits = policy(torch.as_tensor(obs)).numpy()
            choice = np.where(allowed, logits + rng.gumbel(size=logits.shape), -np.inf).argmax(1)
        asked.append((np.full(len(ants), t), ants, obs, allowed, choice))
        return choice

    rewards = [within_goal(obs, env)
               for obs in run_skills(env, skills, choose, args.horizon, args.skill_length)]
    rewards = np.array(rewards, np.float32)
    when, ants, obs, allowed, choice = map(np.concatenate, zip(*asked))
    to_go = rewards[::-1].cumsum(0)[::-1] / args.horizon
    time_left = (1 - when[:, None] / args.horizon).astype(np.float32)
    return [torch.as_tensor(array) for array in (obs, allowed, choice, time_left, to_go[when, ants])], rewards


def untrained_skills(args, num_envs, rng):
    """What load_skills gives, for --floor actions and skills."""
    env = antmaze.make_env(args.env, num_envs, args.seed)
    heads, values = env.action_shape
    if args.floor == "skills":
        torch.manual_seed(args.seed)  # the same skills each time
        network = tatc.Net(29, 2, heads * values, 128, env.obs_scale)
        act = tatc.make_actor(network, tatc.make_directions(tatc.Args()), env.action_shape, rng)
    else:
        act = lambda obs, skill: rng.integers(values, size=(len(obs), heads))  # noqa: E731
    return {"method": f"random {args.floor}", "run_seed": args.seed}, env, Skills(8, act, never_ended), None


def evaluate_skills(args):
    if (args.run is None) != (args.floor in ("actions", "skills")):
        raise UsageError("give --run RUN_DIR, alone or with --floor choices, "
                         "or --floor actions or skills without it")
    torch.manual_seed(args.seed)
    rng, repeats = np.random.default_rng(args.seed), 8

    def prepare(num_envs):
        if args.run is None:
            return untrained_skills(args, num_envs, rng)
        return load_skills(args.run, num_envs, args.seed, rng, args.option_ends)

    facts, env, skills, _ = prepare(args.batch)
    need_goal(env, antmaze.AntMazeVec, "skills")
    if args.floor == "choices":
        facts["method"] = f"random choices of {facts['method']}"
    path, key = begin(args, "skills", "antmaze_skills", facts, env, ["skills"], args.episodes)
    if key is None:
        return
    rows = []
    for name, ants in (("cells", repeats * args.rollouts), ("cells_passed_on", repeats)):
        _, many, many_skills, _ = prepare(ants)
        rows.append(("skills-cells", *key, 0, name, covered_cells(many, many_skills, args, repeats, rng)))
    policy = tatc.Net(29, 0, skills.count, 128, env.obs_scale)
    critic = tatc.Net(29, 1, 1, 128, env.obs_scale)
    optimizer = torch.optim.RMSprop([*policy.parameters(), *critic.parameters()], lr=args.learning_rate,
                                    foreach=True)
    success, updates = [], -(-args.episodes // args.batch)
    bar = tqdm(range(1, updates + 1), unit="update", dynamic_ncols=True)
    for number in bar:
        (obs, allowed, choice, time_left, to_go), rewards = high_level_episodes(
            args, env, skills, None if args.floor == "choices" else policy, rng)
        success.append(rewards.any(0).mean())
        if number % args.log_every == 0 or number == updates:
            rows.append(("skills", *key, number * args.batch, "success", np.mean(success)))
            bar.set_postfix(success=f"{np.mean(success):.2f}")
            success = []
        if args.floor != "choices":
            loss = choice_loss(policy(obs), allowed, choice, critic(obs, time_left).squeeze(-1), to_go,
                               args.entropy_coef)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    add_results(path, rows)
    print(", ".join(f"{row[-2]} {row[-1]:.3f}" for row in (*rows[:2], rows[-1]))
          + f"; {env.diverged} ants diverged")


# ======================================================================================================= film
@dataclass
class Film:
    """An ant under the trained policies of tatc.py, from s0, as a .gif. Needs OpenGL."""

    run: str
    """run directory or checkpoint of tatc.py on an ant maze"""
    path: str = "film.gif"
    """where the animation goes"""
    seed: int = 0
    """seed of the ants; the first of 64 that comes within 4 units of the far end is shown, or the one that
    comes nearest"""
    steps: int = 1000
    """environment steps"""


def draw_film(args):
    path, rng = gridworld.picture_path(args.path, (".gif",)), np.random.default_rng(args.seed)
    facts, states, distance = explore(args.run, args.seed, rng, args.steps)
    arrived = (distance <= 4).any(0)
    ant = np.where(arrived, (distance <= 4).argmax(0), args.steps + distance.min(0)).argmin()
    last = (distance[:, ant] <= 4).argmax() if arrived[ant] else args.steps
    camera = antmaze.AntMazeVec(facts["args"]["env"].removeprefix("ant:"), 1, 0, render_mode="rgb_array")
    pictures = []
    for t in np.linspace(0, last, 100).astype(int):
        camera.place(np.ones(1, bool), states[t, ant][None])
        picture = Image.fromarray(camera.render()[0]).resize((240, 240), Image.Resampling.LANCZOS)
        pictures.append(picture.quantize(64))
    camera.close()
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=80, loop=0)
    end = f"after {last}" if arrived[ant] else "did not"
    print(f"{path}: {arrived.sum()} of 64 ants arrived within {args.steps} steps, this one {end}")


# ====================================================================================================== speed
@dataclass
class Speed:
    """CPU time of antmaze.py and of tatc.py's loop on it against bare MuJoCo and other ants, of SAC against
    Stable-Baselines3 and sbx."""

    results_dir: str = "runs/evaluations"
    """directory for the rows"""


def loop_contenders(updates=10):
    """(steps, {name: run}) of tatc.py's loop on AntMaze-1, and of mujoco.batch with the same torques from the
    same states."""
    args = tatc.Args(env="antmaze1")
    env, _ = tatc.prepare(args)
    networks, omega, rng = tatc.make_networks(args, env), tatc.make_directions(args), np.random.default_rng(0)
    optimizers, recent = tatc.make_optimizers(args, networks), deque(maxlen=args.phi_memory)
    bare, states = antmaze.bare_loop(env.model, args.num_envs, 1, 0)
    skills, played = args.episode_length // args.skill_length, deque(maxlen=updates)

    def loop():
        for number in range(updates):
            if number % skills == 0:
                walks = tatc.start_episodes(args, env, rng)
            batch = obs, actions, skill, _ = tatc.rollout(args, env, networks, omega, walks, rng)
            recent.append((obs[0, :, :: args.pair_gap], torch.as_tensor(walks)))
            ends = number % skills == skills - 1  # as often as an episode does; its length is no matter here
            episode = (obs[0, :, :1], obs[0, :, -1], skill.T) if ends else None
            tatc.update(args, networks, optimizers, omega, batch, episode, recent, rng)
            played.append((obs[0, :, 0].numpy(), actions[0].numpy().swapaxes(0, 1) / 2 - 1))

    def replay():
        for start, torques in played:
            states[:] = start
            for torque in torques:
                bare(torque)

    for _ in range(args.phi_memory // updates):  # warms up, and fills phi's memory
        loop()
    return (updates * args.skill_length * args.num_envs,
            {"tatc.py, whole loop": loop, "mujoco.batch, same steps": replay})


def sac_contenders(moves=16):
    """(steps, {name: run}) of this file's SAC and of its peers on the same batched ants."""
    args = Shaping(reward="xy", steps=200_000)
    env = antmaze.AntMazeVec("antmaze1", args.num_envs, 0)
    agent = Sac(args, env, make_reward("xy", env, None))
    while agent.updates < 8:
        agent.step()

    def ours():
        for _ in range(moves):
            agent.step()

    contenders = {"evaluate.py": ours}
    for package, name in (("stable_baselines3", "Stable-Baselines3"), ("sbx", "sbx")):
        try:
            peer = make_peer(package, args)
        except Exception as error:  # a peer that is absent or of other versions must not stop the others
            print(f"{name}: skipped ({type(error).__name__}: {error})")
        else:
            contenders[name] = partial(peer.learn, moves * args.num_envs, reset_num_timesteps=False)
    return moves * args.num_envs, contenders


def make_peer(package, args):
    """Another package's SAC on batched ants, after its warm-up."""
    SAC = importlib.import_module(package).SAC
    from stable_baselines3.common.vec_env import DummyVecEnv

    ants = antmaze.AntMazeVec("antmaze1", args.num_envs, 0)

    class Ants(DummyVecEnv):
        """AntMazeVec behind Stable-Baselines3's interface, without the goal: only speed is measured."""

        def reset(self):
            return ants.reset()[0]

        def step_wait(self):
            obs = ants.move(self.actions)
            return obs, -np.linalg.norm(obs[:, :2], axis=1), np.zeros(len(obs), bool), [{}] * len(obs)

    peer = SAC("MlpPolicy", Ants([antmaze.AntMazeEnv] * args.num_envs), learning_rate=args.learning_rate,
               buffer_size=args.steps, learning_starts=args.warmup, batch_size=args.batch_size, tau=args.tau,
               gamma=args.gamma, train_freq=1, ent_coef=args.alpha, seed=0,
               gradient_steps=int(args.update_ratio * args.num_envs),
               policy_kwargs={"net_arch": [args.hidden] * 2})
    peer.learn(args.warmup + 2 * args.num_envs)
    return peer


def evaluate_speed(args):
    """Contenders take turns on one core; ratios are of steps per CPU second within each round."""
    rows = []
    for name, cost in antmaze.benchmark("antmaze1", 0).items():
        rows.append(("speed-simulator", name, "antmaze1", 0, 0, 0, "cpu_microseconds", cost))
        print(f"{name}: {cost:.1f} microseconds of CPU per step of an ant")
    for experiment, prepare in (("loop", loop_contenders), ("sac", sac_contenders)):
        steps, contenders = prepare()
        speeds = {name: [] for name in contenders}
        for number, (name, run) in itertools.product(range(1, 6), contenders.items()):
            started = time.process_time()
            run()
            speeds[name].append(steps / (time.process_time() - started))
            rows.append((f"speed-{experiment}", name, "antmaze1", 0, 0, number, "steps_per_cpu_second",
                         speeds[name][-1]))
        first, *others = speeds
        for other in others:
            ratios = np.array(speeds[first]) / speeds[other]
            print(f"{first} / {other}: {np.median(ratios):.2f} [{ratios.min():.2f}, {ratios.max():.2f}]")
    add_results(Path(args.results_dir) / "speed.csv", rows)


# ====================================================== experiments: one list behind plan, tables and figures
GRIDS, ANTS, SEEDS = tuple(gridworld.MAZES), ("antmaze1", "antmaze2"), tuple(range(10, 15))
ENVS = *GRIDS, *ANTS, "antmaze-large"
# run: the label of the training whose run an evaluation takes, if it is not its own label.
Entry = namedtuple("Entry", "experiment label command envs seeds minutes run", defaults=(None,))
UNIFORM_PRIOR = "beta' = 0, uniform prior"
ALLO = "laprep.py --prior uniform --objective allo --reachability --dim 10 --data offline"
TRAININGS = (
    Entry("gridworld", "TATC", "tatc.py", GRIDS, SEEDS, 4),
    *(Entry("ablation", f"TATC, {name}", f"tatc.py {flags}", envs, seeds, 4) for name, flags, envs, seeds in (
        ("beta' = 0", "--boredom-coef 0", ("umaze",), SEEDS),
        ("entropy 0.1", "--low-entropy-coef 0.1", ("tmaze", "4rooms"), SEEDS),
        ("entropy 0.1, beta' = 0", "--low-entropy-coef 0.1 --boredom-coef 0", ("tmaze", "4rooms"), SEEDS),
        (UNIFORM_PRIOR, "--boredom-coef 0 --prior uniform", GRIDS, SEEDS),
        ("one skill per update", "--skills-per-update 1", GRIDS, SEEDS[:1]))),
    *(Entry("readings", f"TATC, {reading}, beta' = {coef}",
            f"tatc.py --updates 4000 --boredom {reading} --boredom-coef {coef}", ("umaze",), SEEDS[:3], 2)
      for reading, coefs in (("sum", ("0.002", "0.01", "0.05", "0.2")), ("mean", ("0.02", "0.1", "0.5")))
      for coef in coefs),
    Entry("readings", "TATC, sum, beta' = 2", "tatc.py --updates 4000 --boredom sum", ("umaze",), SEEDS[:1],
          2),
    Entry("laprep", "Lap-rep (s0), d = 2", "laprep.py", GRIDS, SEEDS, 1.8),
    *(Entry("laprep", f"Lap-rep (s0), d = {dim}", f"laprep.py --dim {dim}", GRIDS, seeds, 1.8)
      for dim, seeds in ((3, SEEDS), (5, SEEDS[:3]), (10, SEEDS[:3]))),
    *(Entry("laprep", f"Lap-rep (s0), d = {dim}, beta = {beta}", f"laprep.py --dim {dim} --beta {beta}",
            GRIDS, SEEDS[:3], 1.8)
      for dim in (2, 3) for beta in ("1", "2.5")),
    Entry("laprep", "Lap-rep (uniform), d = 2", "laprep.py --prior uniform", GRIDS, SEEDS, 1.8),
    Entry("laprep", "Lap-rep (uniform), d = 3", "laprep.py --prior uniform --dim 3", GRIDS, SEEDS, 1.8),
    Entry("laprep", "RA-LapRep (uniform), d = 10", f"{ALLO} --samples 200000 --updates 10000",
          GRIDS, SEEDS, 2.5),
    Entry("antmaze", "TATC", "tatc.py", ("antmaze1",), SEEDS, 22),
    Entry("antmaze", "TATC", "tatc.py", ("antmaze2", "antmaze-large"), SEEDS, 42),
    Entry("ants-ablation", "TATC, beta' = 0", "tatc.py --boredom-coef 0", ("antmaze1",), SEEDS[:3], 22),
    Entry("ants-ablation", "TATC, vanilla A2C",
          "tatc.py --policy-update a2c --skills-per-update 5 --updates 2500", ("antmaze1",), SEEDS[:3], 75),
    Entry("ants-laprep", "Lap-rep (uniform), d = 2", "laprep.py --prior uniform", ANTS, SEEDS, 3),
    Entry("ants-laprep", "Lap-rep (s0), d = 2", "laprep.py", ANTS, SEEDS, 3),
    Entry("ants-laprep", "RA-LapRep (uniform), d = 10", ALLO, ANTS, SEEDS, 20),
    Entry("skills", "DCO", "baselines_dco_diayn.py dco", ("antmaze1",), SEEDS[:3], 50),
    Entry("skills", "DIAYN", "baselines_dco_diayn.py diayn", ("antmaze1",), SEEDS[:3], 20),
    Entry("skills", "DIAYN, position", "baselines_dco_diayn.py diayn --discriminator xy", ("antmaze1",),
          SEEDS[:3], 20),
)
LAPREPS = tuple(f"Lap-rep ({prior}), d = {dim}" for prior in ("s0", "uniform") for dim in (2, 3))
OTHER_LAPREPS = tuple(entry.label for entry in TRAININGS  # higher d, other betas
                      if entry.experiment == "laprep" and entry.seeds == SEEDS[:3])
EVALUATIONS = (
    *(Entry(name, label, f"evaluate.py {name}", GRIDS, SEEDS, 0.5)
      for name in ("prediction", "control") for label in ("TATC", *LAPREPS)),
    *(Entry("prediction", label, "evaluate.py prediction --starts uniform", GRIDS, SEEDS[:3], 0.3)
      for label in OTHER_LAPREPS),
    *(Entry(name, label, f"evaluate.py {name} --starts uniform --features {features}", GRIDS, SEEDS[:3], 0.3)
      for name in ("prediction", "control")
      for label, features in (("exact eigenvectors", "exact"), ("one-hot", "onehot"))),
    *(Entry("shaping", f"{run}, {reward}", f"evaluate.py shaping --reward {reward}", ANTS, SEEDS[:3], 30, run)
      for run in ("TATC", "Lap-rep (uniform), d = 2", "RA-LapRep (uniform), d = 10", "Lap-rep (s0), d = 2")
      for reward in ("dense", "mix")),
    *(Entry("shaping", reward, f"evaluate.py shaping --reward {reward}", ANTS, SEEDS[:3], 30)
      for reward in ("sparse", "xy", "fiedler")),
    Entry("skills", "TATC", "evaluate.py skills", ("antmaze1",), SEEDS, 4),
    Entry("skills", "random choices of TATC", "evaluate.py skills --floor choices", ("antmaze1",), SEEDS, 4,
          "TATC"),
    Entry("skills", "DCO, without ends", "evaluate.py skills --no-option-ends", ("antmaze1",), SEEDS[:3], 4,
          "DCO"),
    *(Entry("skills", label, f"evaluate.py skills{flags}", ("antmaze1",), SEEDS[:3], 4)
      for label, flags in (("DCO", ""), ("DIAYN", ""), ("DIAYN, position", ""),
                           ("random actions", " --floor actions"), ("random skills", " --floor skills"))),
)
EXPERIMENTS = tuple(dict.fromkeys(entry.experiment for entry in (*TRAININGS, *EVALUATIONS)))


@lru_cache(maxsize=None)
def run_of(command, env):
    """(script's name, variant, name of the environment) of a training command, by the script's own rule."""
    script, *words = shlex.split(command)
    module = importlib.import_module(script.removesuffix(".py"))
    args = tyro.cli(module.Args, args=[*words, "--env", env])
    built, variant = module.prepare(args)
    return words[0] if module is baselines else module.__name__, variant, built.name


def training_of(entry, env):
    """The training itself, or the one whose run an evaluation takes on env; None if it takes none."""
    return next((training for training in TRAININGS
                 if training.label == (entry.run or entry.label) and env in training.envs), None)


def method_of(entry, env):
    """The method's name in the rows of an entry."""
    training, name = training_of(entry, env), entry.label
    if training is not None:
        script, variant, _ = run_of(training.command, env)
        prefix = "random choices of " if entry.label.startswith("random choices of") else ""
        name = prefix + add_variant(NAMES[script], variant)
    if entry is training:
        return name
    _, command, *words = shlex.split(entry.command)
    return add_variant(name, own_variant(tyro.cli(COMMANDS[command][0], args=words)))


@dataclass
class Plan:
    """Print the commands behind the results, one per line with its core-minutes on a core of a small server.

    A line needs lines of earlier stages only, so the lines of a stage may run side by side. Each continues
    where it was interrupted or finds itself finished: a plan that was killed is run again as it is.
    """

    experiment: tuple[Literal[EXPERIMENTS], ...] = EXPERIMENTS
    """what to plan, with the trainings that it needs"""
    stage: Optional[Literal["train", "score", "evaluate", "figures"]] = None
    """only these lines"""
    results_dir: str = "results"
    """where the rows go"""


def print_plan(args):
    """The total goes to stderr, so that stdout is a file of commands."""
    if not args.experiment:
        raise UsageError(f"--experiment is empty; choose among {', '.join(EXPERIMENTS)}")
    results = f"--results-dir {shlex.quote(args.results_dir)}"
    stages = {name: {} for name in ("train", "score", "evaluate", "figures")}  # {command: core-minutes}
    wanted = [(entry, env, seed) for entry in (*TRAININGS, *EVALUATIONS)
              if entry.experiment in args.experiment for env in entry.envs for seed in entry.seeds]
    for entry, env, seed in wanted:
        training, sources = training_of(entry, env), [f"--env {env} --seed {seed}"]
        if training is not None:
            script, variant, env_name = run_of(training.command, env)
            run = shlex.quote(f"runs/{script}/{env_name}/{variant}/seed{seed}")
            stages["train"][f"{training.command} --env {env} --seed {seed} --resume"] = training.minutes
            stages["score"][f"evaluate.py scores {results} --runs {run}"] = 1 if env in antmaze.MAZES else 0.1
            again = 0 if entry is training else 3 if entry.experiment == "skills" else 1
            sources = [f"--run {run} --seed {number}" for number in range(again)]
        for source in sources:
            stages["evaluate"][f"{entry.command} {source} --resume {results}"] = entry.minutes
    stages["figures"][f"evaluate.py figures {results}"] = 1
    lines = [line for stage, commands in stages.items() if args.stage in (None, stage)
             for line in commands.items()]
    for command, minutes in lines:
        print(f"python {command}  # {minutes:g} core-minutes")
    print(f"{len(lines)} commands, about {sum(minutes for _, minutes in lines) / 60:.1f} core-hours",
          file=sys.stderr)


# ========================================================================================= figures and tables
@dataclass
class Figures:
    """Redraw the figures and the tables from the result rows; tables go between <!-- table:NAME --> and
    <!-- end --> of the README.md beside the rows."""

    results_dir: str = "results"
    """directory of the result files; the pictures go to its subdirectory figures"""


COLOURS = {"TATC": "#d62728", "Lap-rep (s0), d = 2": "#1f77b4", "Lap-rep (s0), d = 3": "#17becf",
           "Lap-rep (s0), d = 5": "#6baed6", "Lap-rep (s0), d = 10": "#9ecae1",
           "Lap-rep (uniform), d = 2": "#2ca02c", "Lap-rep (uniform), d = 3": "#006d2c",
           "RA-LapRep (uniform), d = 10": "#98df8a", "exact eigenvectors": "#9467bd", "fiedler": "#9467bd",
           "one-hot": "#7f7f7f", "DCO": "#ff7f0e", "DCO, without ends": "#ffbb78", "DIAYN": "#8c564b",
           "DIAYN, position": "#1f77b4", "sparse": "#bcbd22", "xy": "#e377c2", "random actions": "#000000",
           "random skills": "#c49c94", "random choices of TATC": "#f7b6d2"}
STARTS = {"uniform": "uniform starts", "prior": "starts of the non-uniform prior"}
# file: (title, x axis, rows of panels, one panel per environment: (table, metric, y axis))
COMPARISONS = {
    "gridworld_prediction": (
        "Prediction: error of a linear critic on frozen phi, uniform starts.", "A2C updates of 80 episodes",
        (("prediction-uniform", "error_optimal", "error to V*"),
         ("prediction-uniform", "error_policy", "error to V^pi"))),
    "gridworld_control": ("Control: episode reward of an actor-critic on frozen phi.",
                          "A2C updates of 80 episodes",
                          tuple((f"control-{start}", "reward", name) for start, name in STARTS.items())),
    "antmaze_shaping": ("Reward shaping: SAC on distances in phi.", "environment steps",
                        (("shaping", "success", "success"), ("shaping", "distance", "distance to the goal"))),
    "antmaze_skills": ("A new high-level policy over frozen skills, sparse reward.", "episodes",
                       (("skills", "success", "success rate"),)),
    "antmaze_coverage": ("Share of 1x1 cells ever visited.", "environment steps",
                         (("antmaze", "coverage_total", "coverage"),)),
}
# 1x1 cells of AntMaze-Large, of 736, that others visit in 12 hours on a GPU with other episodes and torques,
# read off the project page of TLDR (Bae et al., CoRL 2024).
PEERS = {"TLDR": 730, "METRA": 385, "PEG": 215, "RND": 175}
SPEARMAN = {"spearman_s0": "Spearman, from s0", "spearman_all": "Spearman, all pairs"}
SCORES = SPEARMAN | {"coverage": "coverage", "far": "far"}
LAPLACIAN = SPEARMAN | {"subspace": "subspace", "fiedler_r2": "R² of the exact second eigenvector"}
ANT_SCORES = SCORES | {"coverage_total": "ever visited", "travel": "share where a skill travels",
                       "distance": "distance of the best skill",
                       "reaches_end": "reaches the far end", "reaches_end_1500": "in 1500 steps",
                       "fallen": "fallen", "seconds": "seconds"}
ERRORS = {"error_optimal": "error to V*", "error_policy": "error to V^pi"}
# name: (file, {metric: heading}). A table of trainings is named after its entries' experiment, one of
# evaluations after the experiment of the rows.
TABLES = {
    "gridworld": ("gridworld_training", SCORES), "ablation": ("gridworld_training", SCORES),
    "readings": ("gridworld_training", {"extent": "extent of phi"} | SCORES),
    "laprep": ("gridworld_training", LAPLACIAN), "antmaze": ("antmaze_training", ANT_SCORES),
    "ants-ablation": ("antmaze_training", ANT_SCORES), "ants-laprep": ("antmaze_training", LAPLACIAN),
    **{f"prediction-{start}": ("gridworld_prediction", ERRORS) for start in STARTS},
    **{f"control-{start}": ("gridworld_control", {"reward": "episode reward"}) for start in STARTS},
    "shaping": ("antmaze_shaping", {"success": "success", "success_at_end": "at the end",
                                    "first_success": "first success", "distance": "distance to the goal",
                                    "fallen": "fallen"}),
    "skills": ("antmaze_skills", {"success": "success"}),
    "skills-cells": ("antmaze_skills", {"cells": "cells of 48 skills from s0",
                                        "cells_passed_on": "cells, state passed on"}),
}


def read_curves(results_dir):
    """{(experiment, method, env, metric): {run_seed: [(step, value)]}}, the evaluation's seeds averaged.

    first_success: the first step whose success is above 0, infinity if there is none.
    """
    found, curves = {}, {}
    for file in dict.fromkeys(file for file, _ in TABLES.values()):
        for row in read_results(results_dir / f"{file}.csv"):
            key = row["experiment"], row["method"], row["env"], row["metric"]
            found.setdefault((*key, int(row["run_seed"]), int(row["step"])), []).append(float(row["value"]))
    for (*key, seed, step), values in sorted(found.items()):
        curves.setdefault(tuple(key), {}).setdefault(seed, []).append((step, np.mean(values)))
    for (*key, metric), seeds in list(curves.items()):
        if metric == "success":
            curves[*key, "first_success"] = {
                seed: [min([(step, step) for step, value in curve if value > 0], default=(0, math.inf))]
                for seed, curve in seeds.items()}
    return curves


def table_lines(name, curves, metric):
    """(entry, env, {run_seed: curve}) of every line of a table, environment by environment."""
    kind = TABLES[name][0].split("_")[1]
    for env, entry in itertools.product(ENVS, TRAININGS if kind == "training" else EVALUATIONS):
        if env in entry.envs and entry.experiment == (name if kind == "training" else kind):
            reward = entry.command.split()[-1]
            experiment = {"training": kind, "shaping": f"shaping-{reward}"}.get(kind, name)
            yield entry, env, curves.get((experiment, method_of(entry, env), env, metric), {})


def final_value(name, curve):
    """The last value of a training's curve; of an evaluation's the mean over the last tenth of the steps."""
    last = curve[-1][0]
    begin = last if TABLES[name][0].endswith("training") else 0.9 * last
    return np.mean([value for step, value in curve if step > begin or step == last])


def interval(values, form):
    """Mean and 95 % bootstrap interval."""
    low, high = scipy.stats.bootstrap((values,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    return f"{np.mean(values):{form}} [{low:{form}}, {high:{form}}]"


def score_table(name, curves):
    """A line per entry and environment, a column per metric; every seed where there are fewer than six.

    The third column is the budget: the last step of all seeds, or the range of their last steps.
    """
    file, metrics = TABLES[name]
    unit = {"gridworld_prediction": "updates", "gridworld_control": "updates", "antmaze_skills": "episodes"}
    lines = [f"| | seeds | {unit.get(file, 'steps')} | " + " | ".join(metrics.values()) + " |",
             "|---" * (len(metrics) + 3) + "|"]
    for columns in zip(*(table_lines(name, curves, metric) for metric in metrics)):
        entry, env, _ = columns[0]
        scores = [[final_value(name, curve) for curve in seeds.values()] for *_, seeds in columns]
        cells = [" ".join("never" if value == math.inf else f"{value:.3f}" if abs(value) < 100
                          else f"{value:,.0f}" for value in values)
                 if len(values) < 6 else interval(values, ".3f") for values in scores]
        if any(scores):
            title, count = f"{gridworld.TITLES[env]}: {entry.label}", max(map(len, scores))
            last = sorted({curve[-1][0] for curve in columns[0][2].values()})
            budget = " to ".join(f"{step:,}" for step in dict.fromkeys((last[0], last[-1])))
            lines.append(f"| {title} | {count} | {budget} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else None


def progress_table(curves, label, metric, updates):
    """A line per maze, a column per number of updates; every seed that has come so far."""
    lines = ["| after | " + " | ".join(f"{number} updates" for number in updates) + " |",
             "|---" * (len(updates) + 1) + "|"]
    for (entry, env, seeds), (*_, made) in zip(*(table_lines("ablation", curves, name)
                                                 for name in (metric, "update"))):
        if entry.label == label and seeds:
            cells = [" ".join(f"{dict(seeds[seed])[step * number // done]:.3f}"
                              for seed, [(step, done)] in made.items() if number <= done)
                     for number in updates]
            lines.append(f"| {gridworld.TITLES[env]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else None


def difference_table(name, curves, metric):
    """TATC minus each Lap-rep, over seeds (paired), with the 95 % bootstrap interval."""
    finals = {(entry.label, env): {seed: final_value(name, curve) for seed, curve in seeds.items()}
              for entry, env, seeds in table_lines(name, curves, metric)}
    lines = ["| TATC minus | " + " | ".join(gridworld.TITLES[env] for env in GRIDS) + " |",
             "|---" * (len(GRIDS) + 1) + "|"]
    for label in (*LAPREPS, *OTHER_LAPREPS):
        cells = [label]
        for env in GRIDS:
            ours, theirs = finals["TATC", env], finals.get((label, env), {})
            gap = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
            cells.append(interval(gap, "+.3f") if len(gap) > 2 else "")
        if any(cells[1:]):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else None


def mark_coverage(ax, env, seconds):
    """Core-minutes above the environment steps, and on AntMaze-Large what others reach as dotted lines."""
    pace = np.median([60 * step / spent for [(step, spent)] in seconds.values()])  # steps per core-minute
    top = ax.secondary_xaxis("top", functions=(lambda steps: steps / pace, lambda minutes: minutes * pace))
    top.set_xlabel("core-minutes", fontsize=8)
    for peer, cells in PEERS.items() if env == "antmaze-large" else ():
        ax.axhline(cells / 736, color="0.4", lw=0.8, ls=":")
        ax.text(0.99, cells / 736, peer, transform=ax.get_yaxis_transform(), ha="right", va="top", fontsize=7)


def draw_comparison(path, title, x_label, panels, curves):
    """Curves over trained seeds: a row per (table, metric, y axis) of panels, a column per environment."""
    grid = []
    for name, metric, y_label in panels:
        row = {}
        for entry, env, seeds in table_lines(name, curves, metric):
            colour = COLOURS.get(entry.label) or COLOURS.get(entry.run)
            if seeds and colour:  # the others are in the tables alone
                row.setdefault(env, []).append((entry.label, colour, seeds))
        if row:
            grid.append((y_label, row))
    if not grid:
        return
    columns = max(len(row) for _, row in grid)
    figure, handles = Figure(figsize=(max(8, 4.2 * columns), 2.8 * len(grid) + 1.2), layout="constrained"), {}
    for axes, (y_label, row) in zip(figure.subplots(len(grid), columns, squeeze=False), grid):
        for ax in axes[len(row):]:
            ax.axis("off")
        for ax, (env, found) in zip(axes, row.items()):
            for label, colour, seeds in found:
                style = dict(color=colour, ls="--" if label.endswith("mix") else "-")
                for curve in seeds.values():
                    ax.plot(*zip(*curve), lw=0.6, alpha=0.5, **style)
                length = min(map(len, seeds.values()))
                mean = np.mean([curve[:length] for curve in seeds.values()], axis=0)
                handles[label], = ax.plot(*mean.T, lw=1.8, **style)
            if y_label == "coverage":
                mark_coverage(ax, env, curves["training", "TATC", env, "seconds"])
            ax.set_title(gridworld.TITLES[env], fontsize=10)
            ax.set_xlabel(x_label, fontsize=8)
            ax.grid(alpha=0.3)
        axes[0].set_ylabel(y_label)
    figure.suptitle(f"{title}\nThin: trained seeds; thick: their mean.", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)),
                  fontsize=8)
    figure.savefig(path, dpi=100)
    print(f"figure: {path}")


def committed_phi(results_dir, training, env):
    """The arrays of the first committed seed of a training on env's present maze, or None."""
    script, variant, env_name = run_of(training.command, env.name)
    for path in sorted((results_dir / "phi").glob(f"{script}-{env_name}-{variant}-seed*.npz")):
        try:
            with np.load(path) as file:
                arrays = dict(file)
            if np.array_equal(arrays["xy"], env.truth_xy):
                return arrays
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise UsageError(f"{path} is damaged; restore it") from None
    return None


def phi_figures(results_dir):
    """phi of every maze, its progress, and the ablations, from the committed npz files."""
    representations, progress, ablation = [], [], []
    for env in (antmaze.make_env(name, 1, 0) for name in ENVS):
        found = {entry.label: committed_phi(results_dir, entry, env) for entry in TRAININGS
                 if env.name in entry.envs and entry.experiment in ("gridworld", "antmaze", "ablation")}
        found = {label: arrays for label, arrays in found.items() if arrays is not None}
        if "TATC" in found:
            stages = zip(found["TATC"]["stages"], found["TATC"]["snapshots"])
            if env.name != "antmaze-large":  # the paper's mazes
                representations.append((env, [("phi", found["TATC"]["phi"])]))
            progress.append((env, [(f"update {stage}", phi) for stage, phi in stages]))
        if env.name in GRIDS:
            ablation.append((env, [(label.removeprefix("TATC, "), arrays["phi"])
                                   for label, arrays in found.items()]))
    for name, rows in (("representations", representations), ("progress", progress), ("ablation", ablation)):
        if rows := [row for row in rows if row[1]]:
            path = results_dir / f"figures/{name}.png"
            gridworld.draw_phis(path, rows, across=name == "representations")
            print(f"figure: {path}")


def fill_tables(path, tables):
    """Put each table between its markers; a marker without its end is refused."""
    text = gridworld.read_text(path)
    parts = re.split(r"<!-- table:([\w-]+) -->", text)  # text, name, text, name, ..., text
    for i in range(1, len(parts), 2):
        name, (_, end, rest) = parts[i], parts[i + 1].partition("<!-- end -->")
        if not end:
            raise UsageError(f"{path}: <!-- table:{name} --> has no <!-- end --> before the next table; "
                             "add it")
        parts[i] = f"<!-- table:{name} -->\n{tables.get(name, '(no rows yet)')}\n"
        parts[i + 1] = end + rest
    gridworld.write_atomically(path, "".join(parts).encode())


def draw_figures(args):
    results_dir = Path(args.results_dir)
    curves = read_curves(results_dir)
    if not curves:
        raise UsageError(f"{results_dir} holds no result files; run another subcommand first")
    tables = {name: score_table(name, curves) for name in TABLES}
    tables["differences"] = difference_table("prediction-uniform", curves, "error_optimal")
    tables["differences-control"] = difference_table("control-uniform", curves, "reward")
    tables["uniform-prior"] = progress_table(
        curves, f"TATC, {UNIFORM_PRIOR}", "spearman_s0", (1000, 2500, 4000, 7000))
    tables = {name: table for name, table in tables.items() if table}
    if (results_dir / "README.md").exists():
        fill_tables(results_dir / "README.md", tables)
    print(f"{len(tables)} tables")
    (results_dir / "figures").mkdir(exist_ok=True)
    phi_figures(results_dir)
    for name, comparison in COMPARISONS.items():
        draw_comparison(results_dir / "figures" / f"{name}.png", *comparison, curves)


# ======================================================================================================= main
COMMANDS = {"prediction": (Prediction, evaluate_agent), "control": (Control, evaluate_agent),
            "scores": (Scores, collect_scores), "curves": (Curves, draw_curves),
            "shaping": (Shaping, evaluate_shaping), "skills": (SkillsTask, evaluate_skills),
            "film": (Film, draw_film), "speed": (Speed, evaluate_speed), "plan": (Plan, print_plan),
            "figures": (Figures, draw_figures)}


def main():
    torch.set_num_threads(1)  # networks this small run slower on more threads
    args = tyro.extras.subcommand_cli_from_dict(
        {name: arguments for name, (arguments, _) in COMMANDS.items()})
    gridworld.check_ranges(args, RANGES)
    next(run for arguments, run in COMMANDS.values() if type(args) is arguments)(args)


if __name__ == "__main__":
    gridworld.guarded(main)

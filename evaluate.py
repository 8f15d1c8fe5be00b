"""Evaluations of the learned representations (Erraqabi et al., UAI 2022): result rows, tables and figures.

    python evaluate.py prediction --run runs/tatc/umaze/s0/seed0        # linear critic on phi; rows to results/gridworld_prediction.csv
    python evaluate.py control --run runs/tatc/umaze/s0/seed0           # actor and critic on phi; rows to results/gridworld_control.csv
    python evaluate.py prediction --features exact --env umaze --dim 2  # a reference line instead of a trained run
    python evaluate.py scores --runs runs/laprep/umaze/*/seed*          # the scores logged while training; rows to results/laprep.csv
    python evaluate.py shaping --run runs/tatc/antmaze1/s0/seed0        # SAC on distances in phi; rows to results/antmaze_shaping.csv
    python evaluate.py skills --run runs/tatc/antmaze1/s0/seed0         # frozen skills, sparse task; rows to results/antmaze_skills.csv
    python evaluate.py figures                                          # every figure and README table, from the rows
    python evaluate.py film --run runs/tatc/antmaze1/s0/seed0           # an ant under the trained policies, as pictures
    python evaluate.py plan                                             # the commands behind all of this, one per line

A result row is experiment, method, env, seed, step, metric, value. Repeating a command replaces its rows; two processes may write to
one file at the same time.

Departures from the paper, which says neither how episodes start nor what "value approximation" measures:
E1  Episodes start at uniform states and, in a second training, at s0. Figures and tables show the first: from s0 no agent of any
    representation ever met a goal 53 to 79 steps away within 100 steps.
E2  Value error is the root mean square over all states but the goal, against the optimal values V* and against the exact values of
    the current policy, V^pi (both without the time limit).
E3  phi is centred and divided by one number, so that its coordinates have mean variance 1: Adam's step size then means the same for
    every representation. Distances keep their proportions, and what is linear in phi stays linear.
E4  Shaping: SAC makes one update in eight environment steps, of 128 transitions, with Adam at 3e-4 (paper: 1e-4, presumably an update
    per step) that goes to 0 over the last 30 % of a run, and the target critics follow at the paper's rate per environment step.
E5  Shaping: the critics learn what an action adds to staying where one is, (1 - gamma) Q(s, a) - r(s), where r(s) is the reward of
    arriving in s. Rewards, optimal policies and the actor's gradient are those of the paper's SAC.
E6  Shaping: an ant that falls on its back in training begins anew, and counts as staying there for ever; in evaluations it goes on.
"""

import csv
import fcntl
import io
import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Optional, Tuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; its threads slow small products down
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
import gridworld

COLUMNS = ("experiment", "method", "env", "seed", "step", "metric", "value")
# One colour per method in every figure.
COLOURS = {
    "TATC": "#d62728",
    "Lap-rep s0 d=2": "#1f77b4",
    "Lap-rep s0 d=3": "#17becf",
    "Lap-rep uniform d=2": "#2ca02c",
    "exact eigenvectors": "#9467bd",
    "one-hot": "#7f7f7f",
    "DCO": "#ff7f0e",
    "DIAYN": "#8c564b",
    "sparse": "#bcbd22",
    "xy": "#e377c2",
    "random actions": "#000000",
    "random skills": "#c49c94",
}
DASHED = ("Lap-rep uniform d=2", "exact eigenvectors", "one-hot")  # what has more than s0 and random walks to learn from


class UsageError(Exception):
    """Something the user asked for that cannot be done; the message names the cause and the fix."""


# ------------------------------------------------------------------------------------------------------- result rows
def write_atomically(path, write):
    """Write to a temporary file, flush it to disk, rename: a kill leaves the old file or the new one, never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def locked(directory):
    """Exclusive use of a directory among processes; the lock ends with the process that holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_results(path):
    """The rows of a results file as dicts of strings; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or tuple(reader.fieldnames) != COLUMNS:
            raise UsageError(f"{path} is not a results file; its first line must be {','.join(COLUMNS)}")
        return list(reader)


def add_results(path, rows):
    """Add rows (tuples in the order of COLUMNS), replacing those of the same experiment, method, env and seed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = [dict(zip(COLUMNS, (*map(str, row[:-1]), format(row[-1], ".6g")))) for row in rows]

    def key(row):
        return tuple(row[name] for name in COLUMNS[:4])

    replaced = {key(row) for row in new}
    with locked(path.parent):
        kept = [row for row in read_results(path) if key(row) not in replaced]
        kept = sorted(kept + new, key=key)  # a stable sort: steps stay in order within a key
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def finished(path, last_step, *key):
    """Whether the results file holds rows of key (experiment, method, env, seed) up to last_step."""
    key = tuple(map(str, key))
    return any(tuple(row[name] for name in COLUMNS[:4]) == key and int(row["step"]) >= last_step for row in read_results(Path(path)))


# --------------------------------------------------------------------------------- representations under evaluation
def read_run_args(run_dir):
    """args.json of a run directory."""
    try:
        run_args = json.loads((run_dir / "args.json").read_text())
    except OSError:
        raise UsageError(f"{run_dir} is not a run directory: it has no args.json") from None
    except ValueError:
        run_args = {}
    if not {"script", "env", "seed"} <= set(run_args):
        raise UsageError(f"{run_dir}/args.json is damaged: it does not name script, env and seed")
    if run_args["script"] == "baselines_dco_diayn":
        run_args["script"] = "dco" if "percentile" in run_args else "diayn"
    return run_args


def method_name(run_args):
    """The method's name in rows and figures."""
    if run_args["script"] == "laprep":
        objective = "" if run_args["objective"] == "graph_drawing" else f" {run_args['objective']}"
        return f"Lap-rep {run_args['prior']} d={run_args['dim']}{objective}"
    name = run_args["script"].upper()
    if run_args.get("prior", "s0") != "s0":
        name += f" {run_args['prior']}"
    if run_args.get("boredom_coef") == 0:
        name += " boredom=0"
    if run_args.get("boredom", "squared_mean") != "squared_mean":
        name += f" boredom {run_args['boredom']}"
    ant = str(run_args.get("env")).startswith("ant")
    if run_args.get("low_entropy_coef") == 0.1 and not ant:
        name += " entropy=0.1"
    if run_args["script"] == "tatc" and ant:
        name += f" boredom={run_args['boredom_coef']:g}" if run_args.get("boredom_coef", 5) not in (0, 5) else ""
        name += f" gap={run_args['pair_gap']}" if run_args.get("pair_gap", 10) != 10 else ""
        name += f" memory={run_args['phi_memory']}" if run_args.get("phi_memory", 20) != 20 else ""
        vanilla = run_args.get("skill_update") == "a2c"  # with the paper's Eq. 3
        anneal = 0 if vanilla else 0.5
        name += f" anneal={run_args['anneal']:g}" if run_args.get("anneal", anneal) != anneal else ""
        name += f" floor={run_args['step_floor']:g}" if run_args.get("step_floor", 1 - vanilla) != 1 - vanilla else ""
        cost = 0 if vanilla else 20
        name += f" fall={run_args['fall_cost']:g}" if run_args.get("fall_cost", cost) != cost else ""
        name += f" fall_after={run_args['fall_after']}" if run_args.get("fall_after", 1000) != 1000 else ""
        name += " a2c" if vanilla else ""
    return name


def load_features(args):
    """(env, features [S, d] or None for one-hot, method, seed) of --run or --features; every mismatch is refused."""
    if (args.run is None) == (args.features is None):
        raise UsageError("give either --run RUN_DIR or --features")
    method, seed, env_name = args.method, args.seed, args.env
    if args.run is not None:
        path = Path(args.run)
        if path.suffix != ".npz":
            run_args = read_run_args(path)
            if env_name not in (None, run_args["env"]):
                raise UsageError(f"{path} is a run on {run_args['env']}, not on {env_name}; drop --env")
            env_name, path = run_args["env"], path / "phi.npz"
            method = method_name(run_args) if method is None else method
            seed = run_args["seed"] if seed is None else seed
    if env_name is None:
        raise UsageError("give --env: the maze of the features")
    if env_name.startswith("ant"):
        raise UsageError(f"prediction and control are gridworld evaluations, this is {env_name}; use shaping or skills")
    env = gridworld.make(env_name, 1, 0)
    if env.goal_index is None:
        raise UsageError(f"{env_name} has no goal; mark one cell with G")
    if args.features == "exact":
        dim = 2 if args.dim is None else args.dim
        if not 1 <= dim <= env.num_states:
            raise UsageError(f"--dim is {dim}; use 1 to {env.num_states}, the number of states of {env_name}")
        features, name = env.laplacian_eigenvectors(dim)[1], "exact eigenvectors" + (f" d={dim}" if dim != 2 else "")
    elif args.features == "onehot":
        features, name = None, "one-hot"
    else:
        features, name = read_phi(path, env, args.dim), path.stem
    return env, features, method or name, 0 if seed is None else seed


def read_phi(path, env, dim):
    """phi [S, d] of a phi.npz that belongs to the maze of env."""
    try:
        with np.load(path) as file:
            phi, xy = file["phi"], file["xy"]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; the run has not finished, continue it with --resume") from None
    except Exception as error:
        raise UsageError(f"{path} is not a phi.npz with phi and xy ({type(error).__name__})") from None
    if xy.shape != env.truth_xy.shape or not np.array_equal(xy, env.truth_xy) or len(phi) != len(xy):
        raise UsageError(f"{path} is of another maze than {env.name}: its {len(xy)} states are not the {env.num_states} here")
    if not np.isfinite(phi).all():
        raise UsageError(f"{path} holds values that are not finite")
    if dim not in (None, phi.shape[1]):
        raise UsageError(f"{path} has d = {phi.shape[1]}, not {dim}; drop --dim")
    return phi.astype(np.float64)


def standardise(features):
    """E3: features [S, d] centred, and scaled by one number to mean variance 1."""
    centred = features - features.mean(0)
    return centred / max(np.sqrt(centred.var(0).mean()), 1e-12)


# =============================================================================== prediction and control: the agent
class Net(nn.Module):
    """MLP with two hidden tanh layers on the concatenation of obs and extra.

    obs is a float vector [..., obs_size], scaled by fixed constants, or a state index [...]: the one-hot code of a state times
    the first layer's weight is a row of it.
    """

    def __init__(self, obs_size, extra_size, outputs, hidden, obs_scale=None):
        super().__init__()
        bound = (obs_size + extra_size) ** -0.5  # torch's own default for a linear layer
        self.weight_obs = nn.Parameter(torch.empty(obs_size, hidden).uniform_(-bound, bound))
        self.weight_extra = nn.Parameter(torch.empty(extra_size, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))
        self.register_buffer("obs_scale", None if obs_scale is None else torch.tensor(obs_scale))
        self.middle = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, obs, extra=None):
        return self.layers(obs, extra)[-1]

    def layers(self, obs, extra=None):
        """The two hidden layers and the outputs."""
        if obs.is_floating_point():
            first = F.linear(obs * self.obs_scale, self.weight_obs.T, self.bias)
        else:
            first = F.embedding(obs, self.weight_obs) + self.bias
        if extra is not None:
            first = first + extra @ self.weight_extra
        one = torch.tanh(first)
        two = torch.tanh(self.middle(one))
        return one, two, self.out(two)


class PredictionAgent(nn.Module):
    """Actor: MLP 2x64 tanh on the one-hot state; critic: linear in phi (None: in the one-hot state)."""

    def __init__(self, env, features, hidden):
        super().__init__()
        self.features = None if features is None else torch.as_tensor(features, dtype=torch.float32)
        self.states = torch.arange(env.num_states)
        self.actor = Net(env.num_states, 0, 4, hidden)
        self.weight = nn.Parameter(torch.zeros(env.num_states if features is None else features.shape[1]))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self):
        """logits [S, 4] and values [S] of every state."""
        return self.actor(self.states), (self.weight if self.features is None else self.features @ self.weight) + self.bias


class ControlAgent(nn.Module):
    """MLP 2x64 tanh on phi (None: on the one-hot state) that feeds an action head and a linear critic head."""

    def __init__(self, env, features, hidden):
        super().__init__()
        if features is None:
            self.inputs, self.body = torch.arange(env.num_states), Net(env.num_states, 0, 5, hidden)
        else:
            self.inputs = torch.as_tensor(features, dtype=torch.float32)
            self.body = Net(features.shape[1], 0, 5, hidden, np.ones(features.shape[1], np.float32))

    def forward(self):
        """logits [S, 4] and values [S] of every state."""
        heads = self.body(self.inputs)
        return heads[:, :4], heads[:, 4]


def goal_episodes(env, policy, start, episodes, horizon, gamma, rng):
    """Episodes of the goal task under policy [S, 4]: reward 1 on reaching the goal, which ends the episode, as does the horizon.

    Returns visits [S, 4], the summed Monte-Carlo returns [S, 4] of these visits, the sum of squared returns, and the episodes' rewards
    and discounted returns [episodes]. These sums are all that the loss needs: no network sees a state twice.
    """
    # Pair 4 s + a is drawn by one search: s plus a number of (0, 1], in the sorted sums s + P(action <= a).
    sums = np.cumsum(policy, axis=1)
    sums[:, -1] = 1.0
    sums = (sums + np.arange(env.num_states)[:, None]).ravel()
    next_state = env.next_state.copy()
    next_state[env.goal_index] = env.goal_index  # absorbing: the steps after the end are cut below
    next_state = next_state.ravel()
    if start == "s0":
        state = np.full(episodes, env.start_index)
    else:
        state = rng.integers(env.num_states - 1, size=episodes)
        state += state >= env.goal_index
    pairs = np.empty((horizon, episodes), dtype=np.int64)
    uniform = 1 - rng.random((horizon, episodes), dtype=np.float32)
    for t in range(horizon):
        pairs[t] = sums.searchsorted(state + uniform[t])
        state = next_state[pairs[t]]
    alive = pairs // 4 != env.goal_index
    length = alive.sum(0)
    reward = (state == env.goal_index).astype(np.float64)
    returns = reward * gamma ** (length - 1.0 - np.arange(horizon)[:, None])  # [horizon, episodes]
    pairs, returns = pairs[alive], returns[alive]
    visits = np.bincount(pairs, minlength=4 * env.num_states).reshape(-1, 4)
    summed = np.bincount(pairs, weights=returns, minlength=4 * env.num_states).reshape(-1, 4)
    return visits, summed, np.square(returns).sum(), reward, reward * gamma ** (length - 1.0)


def goal_task_loss(logits, value, visits, returns, squares, entropy_coef):
    """A2C with Monte-Carlo returns, means over all visits; logits, visits, returns (summed) [S, 4], value [S], squares = sum of G^2.

    sum over visits of log pi (G - V) = sum_{s, a} log pi(a|s) (returns_sa - visits_sa V(s)), and likewise for the squared error.
    """
    count = visits.sum()
    log_pi = F.log_softmax(logits, dim=-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    policy_loss = -(log_pi * (returns - visits * value.detach()[:, None])).sum() / count
    policy_loss = policy_loss - entropy_coef * (visits.sum(1) * entropy).sum() / count
    value_loss = ((visits.sum(1) * value.square() - 2 * returns.sum(1) * value).sum() + squares) / count
    return policy_loss + value_loss


def root_mean_square(error):
    return float(np.sqrt(np.mean(np.square(error))))


def least_squares_fit(features, values):
    """The best linear fit of values [n] on [features, 1], features [n, d]: R^2 and root mean square error."""
    inputs = np.column_stack([features, np.ones(len(values))])
    error = values - inputs @ np.linalg.lstsq(inputs, values, rcond=None)[0]
    return {"fit_r2": 1 - error.var() / values.var(), "fit_error": root_mean_square(error)}


@dataclass
class Prediction:
    """How well a linear critic on frozen phi approximates values while an actor on the one-hot state learns the goal task."""

    run: Optional[str] = None
    """run directory of tatc.py or laprep.py on a gridworld, or a phi.npz (then with --env)"""
    features: Optional[Literal["exact", "onehot"]] = None
    """instead of --run: the first --dim exact eigenvectors of the Laplacian (the constant one included), or the one-hot code"""
    env: Optional[str] = None
    """umaze, tmaze, 4rooms or a maze text file; default: the run's"""
    dim: Optional[int] = None
    """d of --features exact (default 2); with --run a check"""
    method: Optional[str] = None
    """name in the rows; default from the run"""
    seed: Optional[int] = None
    """seed of the agent and its episodes; default: the run's, or 0"""
    starts: Tuple[Literal["uniform", "s0"], ...] = ("uniform", "s0")
    """where episodes start; one training for each"""
    updates: int = 3000
    """A2C updates"""
    episodes: int = 80
    """episodes per update"""
    horizon: int = 100
    """steps per episode"""
    gamma: float = 0.98
    """discount"""
    entropy_coef: float = 0.01
    """entropy coefficient"""
    learning_rate: float = 1e-3
    """Adam step size"""
    hidden: int = 64
    """units in each of the two hidden layers"""
    log_every: int = 50
    """updates between two result rows"""
    resume: bool = False
    """do nothing if the results file has the rows of this command already"""
    results: str = "results/gridworld_prediction.csv"
    """file to which the rows go"""


@dataclass
class Control(Prediction):
    """How well an actor-critic on frozen phi learns the goal task."""

    results: str = "results/gridworld_control.csv"
    """file to which the rows go"""


def train_agent(args, env, features, start, seed, make_agent):
    """A2C on the goal task; yields (update, metric, value) every log_every updates."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    agent = make_agent(env, features, args.hidden)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    others = np.arange(env.num_states) != env.goal_index
    optimal = env.optimal_values(args.gamma)
    rewards, discounted = [], []
    for number in tqdm(range(1, args.updates + 1), desc=f"from {start}", unit="update", dynamic_ncols=True, leave=False):
        logits, value = agent()
        policy = F.softmax(logits.detach().double(), dim=-1).numpy()
        visits, returns, squares, reward, discounted_return = goal_episodes(
            env, policy, start, args.episodes, args.horizon, args.gamma, rng
        )
        rewards.append(reward.mean())
        discounted.append(discounted_return.mean())
        if number % args.log_every == 0 or number == args.updates:
            estimate = value.detach().double().numpy()
            yield number, "reward", np.mean(rewards)
            yield number, "discounted_return", np.mean(discounted)
            yield number, "error_optimal", root_mean_square((estimate - optimal)[others])
            yield number, "error_policy", root_mean_square((estimate - env.policy_values(policy, args.gamma))[others])
            rewards, discounted = [], []
        tensors = (torch.as_tensor(array, dtype=torch.float32) for array in (visits, returns))
        loss = goal_task_loss(logits, value, *tensors, float(squares), args.entropy_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate_agent(args):
    """The body of `prediction` and `control`."""
    torch.set_num_threads(1)
    for name in ("updates", "episodes", "horizon", "hidden", "log_every"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least 1")
    if not 0 < args.gamma < 1:
        raise UsageError(f"--gamma is {args.gamma}; use a number between 0 and 1")
    for name in ("entropy_coef", "learning_rate"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a non-negative number")
    experiment, make_agent = ("control", ControlAgent) if isinstance(args, Control) else ("prediction", PredictionAgent)
    env, features, method, seed = load_features(args)
    env_name = Path(env.name).stem
    print(f"{experiment} of {method} on {env_name}, seed {seed}, rows to {args.results}")
    if args.resume and all(finished(args.results, args.updates, f"{experiment}-{start}", method, env_name, seed) for start in args.starts):
        return print("finished already")
    rows = []
    if experiment == "prediction":
        others = np.arange(env.num_states) != env.goal_index
        table = np.eye(env.num_states) if features is None else features
        fit = least_squares_fit(table[others], env.optimal_values(args.gamma)[others])
        rows += [("fit", method, env_name, seed, 0, metric, value) for metric, value in fit.items()]
        print(", ".join(f"{metric} {value:.3f}" for metric, value in fit.items()))
    features = None if features is None else standardise(features)
    for start in args.starts:
        logged = list(train_agent(args, env, features, start, seed, make_agent))
        rows += [(f"{experiment}-{start}", method, env_name, seed, *entry) for entry in logged]
        print(f"from {start}: " + ", ".join(f"{metric} {value:.3f}" for _, metric, value in logged[-4:]))
    add_results(args.results, rows)


# ================================================================================================ scores of trained runs
@dataclass
class Scores:
    """Copy the scores that training runs logged (the eval/ columns of metrics.csv) into result rows, their phi.npz, and of ants the networks."""

    runs: Tuple[str, ...]
    """run directories"""
    results: str = "results/laprep.csv"
    """file to which the rows go; phi.npz goes to phi/ beside it, a checkpoint without what only training needs to checkpoints/"""
    every: int = 500
    """rows of metrics.csv are kept whose update is a multiple of this, and the last one"""
    method: Optional[str] = None
    """name in the rows; default from the run"""
    copy: bool = True
    """copy phi.npz and networks too"""


def far_end_steps(env_name, metrics):
    """[("far_end_steps", environment steps until an ant was within 4 units of the furthest cell)], empty if none was, to a row's accuracy."""
    furthest = antmaze.make(env_name.removeprefix("ant:"), 1, 0).cell_distance.max()
    found = [float(row["env_steps"]) for row in metrics if row.get("rollout/reached") and float(row["rollout/reached"]) >= furthest - 4]
    return [("far_end_steps", found[0])] if found else []


def collect_scores(args):
    """The body of `scores`; the step of a row is the number of environment steps."""
    rows = []
    for run in map(Path, args.runs):
        run_args = read_run_args(run)
        env_name = Path(run_args["env"].replace(":", "-")).stem
        try:
            with open(run / "metrics.csv", newline="") as file:
                metrics = list(csv.DictReader(file))
        except FileNotFoundError:
            raise UsageError(f"{run} has no metrics.csv") from None
        ant = run_args["env"] in antmaze.MAZES or run_args["env"].startswith("ant:")
        key = "representation", args.method or method_name(run_args), env_name, run_args["seed"]
        names = [name for name in metrics[0] if name.startswith("eval/") or (ant and name in ("rollout/reached", "rollout/skill_reward"))]
        for row in (row for row in metrics if int(row["update"]) % args.every == 0 or row is metrics[-1]):
            rows += [(*key, row["env_steps"], name.split("/")[1], float(row[name])) for name in names if row[name]]
        if ant:
            rows += [(*key, metrics[-1]["env_steps"], *entry)
                     for entry in [("updates", float(metrics[-1]["update"])), *far_end_steps(run_args["env"], metrics)]]
        if not args.copy:
            continue
        parent, name = Path(args.results).parent, f"{run_args['script']}-{env_name}-{run.parent.name}-seed{run_args['seed']}"
        if (run / "phi.npz").exists():
            copy = parent / "phi" / f"{name}.npz"
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, lambda file: file.write((run / "phi.npz").read_bytes()))
        if ant:
            checkpoint, _ = load_run(run)
            keep = ("skills",) if checkpoint.get("skills") else ("networks", "phi")
            slim = {key: checkpoint[key] for key in ("script", "args", "update", *keep) if key in checkpoint}
            if "skills" in slim:  # eight networks of DCO are 9 MB; a file to commit takes half
                slim["skills"] = {key: [layer.half() for layer in value] if isinstance(value, list) else value
                                  for key, value in slim["skills"].items()}
            copy = parent / "checkpoints" / f"{name}.pt"
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, lambda file: torch.save(slim, file))
    add_results(args.results, rows)
    print(f"{len(rows)} rows of {len(args.runs)} runs to {args.results}")


# ==================================================================================== shaping: SAC on distances in phi
# What the paper leaves open: observations are scaled by antmaze's fixed constants; all ants end their episodes together; one whose
# physics diverged goes on from s0, and that step is not learned from.
@dataclass
class Shaping:
    """SAC on batched ants, rewarded by the distance to the goal in a learned phi (or in the plane, or by success alone)."""

    run: Optional[str] = None
    """run directory of tatc.py or laprep.py on an ant maze, or its checkpoint; not for --reward sparse and xy"""
    reward: Literal["dense", "mix", "sparse", "xy"] = "dense"
    """dense -||phi(s') - phi(g)||, mix half dense half sparse, sparse 1 within epsilon = 2 of the goal, xy -||xy' - g||"""
    reward_scale: Optional[float] = None
    """factor of the reward; default: the reward spans 10 over the positions of the maze; for mix twice the factor of dense"""
    env: Optional[str] = None
    """antmaze1, antmaze2 or ant:FILE; default: the run's, or antmaze1"""
    method: Optional[str] = None
    """name in the rows; default from the run"""
    seed: Optional[int] = None
    """seed of the agent and its ants; default: the run's, or 0"""
    steps: int = 2_000_000
    """environment steps (paper: 5 million)"""
    num_envs: int = 32
    """ants side by side"""
    horizon: int = 1000
    """steps per episode; the end is a truncation, values are bootstrapped there"""
    end_on_success: bool = False
    """reaching the goal ends an ant's episode, as a terminal state"""
    end_on_fall: bool = True
    """an ant that falls on its back in training begins anew, and counts as staying there for ever; evaluations go on"""
    warmup: int = 10_000
    """environment steps with uniform actions before the first update"""
    update_ratio: float = 0.125
    """updates per environment step (update-to-data ratio); at 0.125 updates are 85% of the time (3.8 ms each, 0.08 ms per step)"""
    batch_size: int = 128
    """transitions per update"""
    buffer: int = 5_000_000
    """transitions held; memory is taken as they come"""
    hidden: int = 256
    """units in each of the two hidden layers"""
    gamma: float = 0.99
    """discount"""
    alpha: float = 0.1
    """entropy coefficient"""
    tau: float = 0.005
    """step of the target critics towards the critics, per environment step: an update makes up for the steps since the last"""
    learning_rate: float = 3e-4
    """Adam step size (paper: 1e-4)"""
    anneal: float = 0.3
    """share of the steps, the last ones, over which the Adam step size goes linearly to 0 (paper: 0, constant)"""
    eval_every: int = 50_000
    """environment steps between two evaluations of the deterministic policy"""
    eval_episodes: int = 16
    """episodes per evaluation, side by side"""
    run_dir: Optional[str] = None
    """where checkpoints go; default runs/shaping/<env>/<method>-<reward>/seed<seed>"""
    resume: bool = False
    """continue from the checkpoint in the run directory, or start if there is none"""
    save_replay: bool = False
    """checkpoints hold the replay (154 bytes per transition) and continue bit for bit; otherwise it is filled anew by the policy"""
    checkpoint_every: int = 4
    """evaluations between two checkpoints"""
    benchmark: bool = False
    """time this SAC against Stable-Baselines3's instead (minutes; needs stable-baselines3); rows to antmaze_shaping_speed.csv"""
    results: str = "results/antmaze_shaping.csv"
    """file to which the rows go"""


def load_run(run):
    """(checkpoint, args of the run with its script) of a run directory or a checkpoint file."""
    path = Path(run) / "checkpoint.pt" if Path(run).is_dir() else Path(run)
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a run directory with a checkpoint.pt, or a checkpoint")
    try:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(f"{path} is damaged or not a checkpoint ({type(error).__name__})") from None
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("args"), dict) or not {"env", "seed"} <= set(checkpoint["args"]):
        raise UsageError(f"{path} is not a checkpoint of tatc.py, laprep.py or baselines_dco_diayn.py")
    return checkpoint, checkpoint["args"] | {"script": checkpoint.get("script", "unknown")}


def ant_maze(env_name, run_args, num_envs, seed):
    """The AntMazeVec of --env or of the run; a gridworld, a maze without goal and a contradiction are refused."""
    if run_args is not None and env_name not in (None, run_args["env"]):
        raise UsageError(f"the run is on {run_args['env']}, not on {env_name}; drop --env")
    env_name = env_name or (run_args["env"] if run_args else "antmaze1")
    if env_name not in antmaze.MAZES and not env_name.startswith("ant:"):
        raise UsageError(f"shaping and skills are evaluations on ants, this is {env_name}; use prediction or control")
    env = antmaze.make(env_name.removeprefix("ant:"), num_envs, seed)
    if env.goal_index is None:
        raise UsageError(f"{env_name} has no goal; mark one block with G")
    return env, Path(env_name.removeprefix("ant:")).stem


def rebuild_network(state):
    """A network of tatc.py (two hidden tanh layers) or laprep.py (three hidden ReLU layers) from its state_dict, as a function.

    obs [..., 29] and, for those that take it, extra [..., k] -> [..., outputs]; told apart by their layers' names.
    """
    layers, activation = (("middle", "out"), torch.tanh) if "middle.weight" in state else (("second", "third", "out"), F.relu)
    if not {"weight_obs", "bias", "obs_scale", *(f"{name}.weight" for name in layers)} <= set(state):
        raise UsageError("the checkpoint holds a network of another kind than tatc.py's and laprep.py's on the ants")
    weight = state["obs_scale"][:, None] * state["weight_obs"]

    def network(obs, extra=None):
        hidden = obs @ weight + state["bias"]
        if extra is not None:
            hidden = hidden + extra @ state["weight_extra"]
        for name in layers:
            hidden = F.linear(activation(hidden), state[f"{name}.weight"], state[f"{name}.bias"])
        return hidden

    return network


def part_of(state, name):
    """The state_dict of one network of a ModuleDict's."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def load_phi(checkpoint):
    """phi of a checkpoint of tatc.py or laprep.py, as a function obs [..., 29] -> [..., d]."""
    if "phi" not in checkpoint and "networks" not in checkpoint:
        raise UsageError("the run has no phi; shaping takes runs of tatc.py and laprep.py")
    return rebuild_network(checkpoint["phi"] if "phi" in checkpoint else part_of(checkpoint["networks"], "phi"))


def within_goal(obs, env):
    """obs [N, 29] -> [N] bool: within epsilon of the goal, in the plane."""
    return np.linalg.norm(obs[:, :2] - env.goal_xy, axis=1) <= antmaze.GOAL_RADIUS


def make_reward(kind, env, phi):
    """(reward(next_obs [N, 29]) -> [N] float32, default factor: see Shaping.reward_scale)."""
    goal = antmaze.RESET_POSE.astype(np.float32)
    goal[:2] = env.goal_xy
    if phi is not None:
        phi_goal = phi(torch.as_tensor(goal))

    def dense(obs):
        return -(phi(torch.as_tensor(obs)) - phi_goal).norm(dim=-1).numpy()

    def sparse(obs):
        return within_goal(obs, env).astype(np.float32)

    reward = {
        "dense": dense, "sparse": sparse, "mix": lambda obs: 0.5 * dense(obs) + 0.5 * sparse(obs),
        "xy": lambda obs: -np.linalg.norm(obs[:, :2] - env.goal_xy, axis=1).astype(np.float32),
    }[kind]
    span = np.ptp((dense if kind == "mix" else reward)(env.truth_obs))
    if not 1e-6 < span < np.inf:
        raise UsageError(f"the distances of phi to the goal span {span:.3g} over the maze: phi has collapsed or is damaged")
    return reward, float((20 if kind == "mix" else 10) / span)


class AntReplay:
    """Transitions of N ants in lock-step; obs [T, N, 29] holds each state once, because the next state is always the next row.

    An episode of K steps takes K + 1 rows: the last holds the final states, from which values are bootstrapped, and no transition.
    `usable` [T, N] marks what may be drawn. After a terminal state the next row may hold another episode's first: no target reads it.
    """

    def __init__(self, capacity, num_envs, horizon):
        self.rows = -(-capacity // num_envs)
        self.rows += -(-self.rows // horizon) + 1
        self.obs = np.zeros((self.rows, num_envs, 29), np.float32)
        self.actions = np.zeros((self.rows, num_envs, 8), np.float32)
        self.progress = np.zeros((self.rows, num_envs), np.float32)
        self.terminated = np.zeros((self.rows, num_envs), bool)
        self.usable = np.zeros((self.rows, num_envs), bool)
        self.row, self.filled = 0, 0  # next to write; rows that hold something

    ARRAYS = ("obs", "actions", "progress", "terminated", "usable")

    def add(self, obs, actions, progress, terminated, next_obs, usable, last):
        """One step of all ants; `last`: the episodes end here, and the next `obs` are not these next_obs."""
        row, following = self.row, (self.row + 1) % self.rows
        for name, value in zip(self.ARRAYS, (obs, actions, progress, terminated, usable)):
            getattr(self, name)[row] = value
        self.obs[following], self.usable[following] = next_obs, False
        self.filled = max(self.filled, row + 1, following + 1)
        self.row = (following + int(last)) % self.rows

    def sample(self, count, rng):
        """count transitions, uniformly: obs, actions, progress, terminated, next_obs as tensors of leading size count."""
        num_envs = self.obs.shape[1]
        usable = self.usable.reshape(-1)
        index = rng.integers(self.filled * num_envs, size=count)
        while len(bad := np.flatnonzero(~usable[index])):
            index[bad] = rng.integers(self.filled * num_envs, size=len(bad))
        following = (index + num_envs) % (self.rows * num_envs)
        flat = (self.obs.reshape(-1, 29), self.actions.reshape(-1, 8), self.progress.reshape(-1), self.terminated.reshape(-1))
        return [torch.from_numpy(array[index]) for array in flat] + [torch.from_numpy(flat[0][following])]

    def state(self):
        return {name: torch.from_numpy(getattr(self, name)[: self.filled].copy()) for name in self.ARRAYS} | {"row": self.row}

    def load(self, state):
        self.row, self.filled = state["row"], len(state["obs"])
        for name in self.ARRAYS:
            getattr(self, name)[: self.filled] = state[name].numpy()


class Mlps(nn.Module):
    """Networks with two hidden ReLU layers, side by side: x [copies or 1, n, inputs] -> [copies, n, outputs].

    Gradients are written out: in updates this small autograd costs up to half as much again as everything else. All weights are one
    vector `flat`, so that Adam and the step of the targets are one call each.
    """

    def __init__(self, copies, inputs, outputs, hidden):
        super().__init__()
        sizes = ((inputs, hidden), (hidden, hidden), (hidden, outputs))
        self.shapes = [(copies, n, m) for fan_in, fan_out in sizes for n, m in ((fan_in, fan_out), (1, fan_out))]
        bounds = [fan_in**-0.5 for fan_in, _ in sizes for _ in range(2)]  # torch's own default for a linear layer
        values = [torch.empty(math.prod(shape)).uniform_(-bound, bound) for shape, bound in zip(self.shapes, bounds)]
        self.flat = nn.Parameter(torch.cat(values))
        self.flat.grad = torch.zeros_like(self.flat)
        self.layers, self.gradients = self.split(self.flat.detach()), self.split(self.flat.grad)

    def split(self, flat):
        """Views of a vector like `flat`: weight [copies, n, m] and bias [copies, 1, m] of each layer in turn."""
        return [part.view(shape) for part, shape in zip(flat.split([math.prod(shape) for shape in self.shapes]), self.shapes)]

    @torch.no_grad()
    def forward(self, x):
        """The outputs, and the inputs of the three layers, which `backward` needs."""
        weight1, bias1, weight2, bias2, weight3, bias3 = self.layers
        x = x.expand(len(weight1), -1, -1)
        hidden1 = torch.baddbmm(bias1, x, weight1).relu_()
        hidden2 = torch.baddbmm(bias2, hidden1, weight2).relu_()
        return torch.baddbmm(bias3, hidden2, weight3), (x, hidden1, hidden2)

    @torch.no_grad()
    def backward(self, inputs, grad3, learn=True):
        """Gradients of a loss from its gradient by the outputs: of the weights, if learn, to flat.grad; returns that by layer 1's sums."""
        weight1, _, weight2, _, weight3, _ = self.layers
        grad2 = torch.ops.aten.threshold_backward(torch.bmm(grad3, weight3.mT), inputs[2], 0)
        grad1 = torch.ops.aten.threshold_backward(torch.bmm(grad2, weight2.mT), inputs[1], 0)
        if learn:
            for i, (x, grad) in enumerate(zip(inputs, (grad1, grad2, grad3))):
                torch.bmm(x.mT, grad, out=self.gradients[2 * i])
                torch.sum(grad, 1, keepdim=True, out=self.gradients[2 * i + 1])
        return grad1


def squash(outputs, noise):
    """Torques [n, 8] and their log density [n]: a Gaussian, mean and log deviation in outputs [n, 16], through tanh."""
    mean, log_std = outputs[:, :8], outputs[:, 8:].clamp(-20, 2)
    before = mean + log_std.exp() * noise
    log_slope = 2 * (math.log(2) - before - F.softplus(-2 * before))  # log(1 - tanh^2)
    return before.tanh(), (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - log_slope).sum(-1)


def squash_gradient(outputs, noise, actions, grad_actions, grad_log_prob):
    """Gradient [n, 16] by the outputs of a loss with gradients grad_actions [n, 8] and grad_log_prob, a number, by squash's results."""
    log_std = outputs[:, 8:]
    grad_before = grad_actions * (1 - actions.square()) + 2 * grad_log_prob * actions
    grad_log_std = (grad_before * log_std.clamp(-20, 2).exp() * noise - grad_log_prob) * ((log_std >= -20) & (log_std <= 2))
    return torch.cat([grad_before, grad_log_std], dim=-1)


def sac_progress(before, after, succeeded, gamma):
    """What takes the reward's place for critics of (1 - gamma) Q(s, a) - r(s) (E5), all [n]: r(s') - r(s).

    Q(s, a) = r(s') + gamma V(s') times 1 - gamma, minus r(s), is r(s') - r(s) + gamma ((1 - gamma) V(s') - r(s')). Where an episode
    ends without more, on success, V(s') is 0; an ant on its back has V(s') = r(s') / (1 - gamma), and the last term is 0.
    """
    return after - before - gamma * succeeded * after


def sac_target(progress, terminated, next_values, next_log_prob, gamma, alpha):
    """progress + gamma (min_i C_i(s', a') - alpha log pi(a'|s')), all [n], next_values [2, n]; nothing follows a terminal state."""
    return progress + gamma * ~terminated * (next_values.amin(0) - alpha * next_log_prob)


@torch.no_grad()
def sac_update(args, actor, critics, targets, actor_optimizer, critic_optimizer, batch):
    """One step of the twin critics, of the actor through the new critics, and of the target critics.

    batch: that of AntReplay.sample, observations times obs_scale. The critics are C of E5, so alpha is times 1 - gamma as well.
    """
    obs, actions, progress, terminated, next_obs = batch
    count, alpha = len(obs), args.alpha * (1 - args.gamma)
    noise, next_noise = torch.randn(2, count, 8)
    next_actions, next_log_prob = squash(actor(next_obs)[0][0], next_noise)
    next_values, _ = targets(torch.cat([next_obs, next_actions], dim=-1))
    target = sac_target(progress, terminated, next_values[..., 0], next_log_prob, args.gamma, alpha)
    values, inputs = critics(torch.cat([obs, actions], dim=-1))  # loss: sum over the critics of mean (C - target)^2
    critics.backward(inputs, (values - target[:, None]) * (2 / count))
    critic_optimizer.step()
    outputs, actor_inputs = actor(obs)  # loss: mean of alpha log pi - min C
    new_actions, _ = squash(outputs[0], noise)
    values, inputs = critics(torch.cat([obs, new_actions], dim=-1))
    grad_hidden = critics.backward(inputs, (values == values.amin(0)) * (-1 / count), learn=False)
    grad_actions = torch.bmm(grad_hidden, critics.layers[0][:, 29:].mT).sum(0)
    actor.backward(actor_inputs, squash_gradient(outputs[0], noise, new_actions, grad_actions, alpha / count)[None])
    actor_optimizer.step()
    targets.flat.lerp_(critics.flat, 1 - (1 - args.tau) ** (1 / args.update_ratio))


@torch.no_grad()
def evaluate_policy(env, act, reward, horizon, seed):
    """One episode of each ant of env from s0 with actions act(obs) -> {metric: mean}; the return is that of the unscaled reward."""
    env.reset(seed=seed)
    env.diverged = 0
    reached, total = np.zeros(env.num_envs, bool), np.zeros(env.num_envs)
    for _ in range(horizon):
        obs = env.move(act(env.obs))
        reached |= within_goal(obs, env)
        total += reward(obs)
    return {"success": reached.mean(), "success_at_end": within_goal(env.obs, env).mean(), "return": total.mean(),
            "distance": env.geodesic(env.obs[:, :2], env.goal_xy).mean(), "flipped": env.flipped().mean(), "diverged": env.diverged}


class Sac:
    """All that changes while SAC trains: networks, optimisers, replay, ants and counters; `step` is one step of all ants."""

    def __init__(self, args, env, reward, scale):
        torch.manual_seed(args.seed)
        self.args, self.env, self.reward, self.scale = args, env, reward, scale
        self.rng = np.random.default_rng(args.seed)
        self.obs_scale = torch.tensor(env.obs_scale)
        self.networks = nn.ModuleDict({"actor": Mlps(1, 29, 16, args.hidden), "critics": Mlps(2, 37, 1, args.hidden),
                                       "targets": Mlps(2, 37, 1, args.hidden)})
        self.networks["targets"].load_state_dict(self.networks["critics"].state_dict())
        self.optimizers = [torch.optim.Adam(self.networks[name].parameters(), lr=args.learning_rate, fused=True)
                           for name in ("actor", "critics")]
        self.replay = AntReplay(args.buffer, args.num_envs, args.horizon)
        self.moves, self.updates = 0, 0  # steps of all ants together; gradient steps
        self.begin_updates = args.warmup  # environment steps without an update

    def act(self, obs):
        """The deterministic policy: obs [N, 29] -> torques [N, 8]."""
        return self.policy(obs)[:, :8].tanh().numpy()

    def sample(self, obs):
        """The policy as it acts in training: obs [N, 29] -> torques [N, 8]."""
        return squash(self.policy(obs), torch.randn(len(obs), 8))[0].numpy()

    def policy(self, obs):
        """The actor's outputs [N, 16] at obs [N, 29]."""
        return self.networks["actor"](torch.as_tensor(obs) * self.obs_scale)[0][0]

    def step(self):
        args, env, obs = self.args, self.env, self.env.obs
        if self.moves * args.num_envs < args.warmup:
            actions = self.rng.uniform(-1, 1, (args.num_envs, 8)).astype(np.float32)
        else:
            actions = self.sample(obs)
        next_obs = env.move(actions)
        self.moves += 1
        with torch.no_grad():
            before, after = self.scale * self.reward(np.concatenate([obs, next_obs])).reshape(2, -1)
        succeeded = within_goal(next_obs, env) & args.end_on_success
        terminated = succeeded | (env.flipped() & args.end_on_fall)
        progress = sac_progress(before, after, succeeded, args.gamma)
        last = self.moves % args.horizon == 0
        self.replay.add(obs, actions, progress, terminated, next_obs, ~env.last_diverged, last)
        if last or terminated.any():
            env.place(terminated | last, "s0")
        left = (args.steps - self.moves * args.num_envs) / args.steps  # share of the steps
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (min(1.0, max(left, 0.0) / args.anneal) if args.anneal else 1.0)
        due = int(args.update_ratio * (self.moves * args.num_envs - self.begin_updates)) - self.updates
        if due > 0:
            obs, *parts, next_obs = self.replay.sample(due * args.batch_size, self.rng)
            parts = (obs * self.obs_scale, *parts, next_obs * self.obs_scale)
            for batch in zip(*(part.split(args.batch_size) for part in parts)):
                sac_update(args, *self.networks.values(), *self.optimizers, batch)
            self.updates += due

    def state(self):
        state = {"networks": self.networks.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                 "moves": self.moves, "updates": self.updates, "begin_updates": self.begin_updates, "rng": self.rng.bit_generator.state,
                 "torch_rng": torch.get_rng_state(),
                 "env": {key: torch.as_tensor(value) if isinstance(value, np.ndarray) else value
                         for key, value in self.env.get_state().items()}}
        return state | ({"replay": self.replay.state()} if self.args.save_replay else {})

    def load(self, state):
        self.networks.load_state_dict(state["networks"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.moves, self.updates, self.begin_updates = state["moves"], state["updates"], state["begin_updates"]
        self.rng.bit_generator.state = state["rng"]
        torch.set_rng_state(state["torch_rng"])
        self.env.set_state(state["env"])
        if "replay" in state:
            self.replay.load(state["replay"])
        else:  # no updates until the policy has filled the replay again as far as the warm-up did
            self.begin_updates += max(self.args.warmup, self.args.batch_size)


def check_shaping(args):
    """Every number of --help in its range, or one line that says which is not."""
    for name in ("steps", "num_envs", "horizon", "warmup", "batch_size", "buffer", "hidden", "eval_every", "eval_episodes",
                 "checkpoint_every"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least 1")
    if not 0 <= args.anneal <= 1:
        raise UsageError(f"--anneal is {args.anneal}; use a number from 0 to 1")
    if not 0 < args.gamma < 1:
        raise UsageError(f"--gamma is {args.gamma}; use a number between 0 and 1")
    if not 0 < args.tau <= 1:
        raise UsageError(f"--tau is {args.tau}; use a number above 0 and at most 1")
    for name in ("reward_scale", "update_ratio", "learning_rate", "alpha"):
        value = getattr(args, name)
        if value is not None and not (0 <= value < float("inf")):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; use a non-negative number")


def prepare_shaping(args):
    """(env, reward, factor, name of the maze) of the arguments, in which method, seed and run_dir take their values."""
    check_shaping(args)
    needs_phi = args.reward in ("dense", "mix")
    if needs_phi != (args.run is not None):
        raise UsageError(f"--reward {args.reward} " + ("needs --run" if needs_phi else "uses no representation; drop --run"))
    checkpoint, run_args = load_run(args.run) if needs_phi else (None, None)
    if args.seed is None:
        args.seed = run_args["seed"] if run_args else 0
    env, env_name = ant_maze(args.env, run_args, args.num_envs, args.seed)
    with torch.no_grad():
        reward, scale = make_reward(args.reward, env, load_phi(checkpoint) if needs_phi else None)
    args.method = args.method or (method_name(run_args) if needs_phi else args.reward)
    if args.run_dir is None:
        variant = f"{args.method}-{args.reward}" if needs_phi else args.reward
        args.run_dir = f"runs/shaping/{env_name}/{variant.replace(' ', '_')}/seed{args.seed}"
    return env, reward, scale if args.reward_scale is None else args.reward_scale, env_name


def evaluate_shaping(args):
    """The body of `shaping`."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages, which run slower
    env, reward, scale, env_name = prepare_shaping(args)
    if args.benchmark:
        return benchmark_sac(args, env, reward, scale, env_name)
    print(f"shaping with {args.reward} of {args.method} on {env_name}, seed {args.seed}, reward times {scale:.4g}, run in {args.run_dir}")
    key = f"shaping-{args.reward}", args.method, env_name, args.seed
    if args.resume and finished(args.results, args.steps, *key):
        return print("finished already")
    agent, judge = Sac(args, env, reward, scale), antmaze.make(env.name, args.eval_episodes, 0)
    path, logged = Path(args.run_dir) / "checkpoint.pt", []
    free = ("run_dir", "resume", "save_replay", "checkpoint_every", "results", "benchmark", "run") + (() if args.anneal else ("steps",))
    identity = {key: value for key, value in asdict(args).items() if key not in free} | {"env": env_name, "reward_scale": scale}
    if args.resume and path.exists():
        checkpoint, _ = load_run(path)
        other = [f"{key} {old!r} there, {identity.get(key)!r} here" for key, old in checkpoint["args"].items() if identity.get(key) != old]
        if other or checkpoint.get("script") != "shaping":
            raise UsageError(f"{path} is of another run ({'; '.join(other)}); use its arguments or another --run-dir")
        agent.load(checkpoint["agent"])
        logged = [tuple(entry) for entry in checkpoint["logged"]]
    elif path.exists():
        raise UsageError(f"{path.parent} holds a run already; add --resume to continue it or choose another --run-dir")
    path.parent.mkdir(parents=True, exist_ok=True)
    moves = -(-args.steps // args.num_envs)
    every = max(1, args.eval_every // args.num_envs)
    bar = tqdm(initial=agent.moves * args.num_envs, total=moves * args.num_envs, unit="step", unit_scale=True, dynamic_ncols=True)
    while agent.moves < moves:
        agent.step()
        bar.update(args.num_envs)
        if agent.moves % every == 0 or agent.moves == moves:
            steps = agent.moves * args.num_envs
            scores = evaluate_policy(judge, agent.act, reward, args.horizon, args.seed + agent.moves)
            with torch.random.fork_rng():  # an evaluation leaves the training as it is
                sampled = evaluate_policy(judge, agent.sample, reward, args.horizon, args.seed + agent.moves)
            scores |= {f"sampled_{name}": sampled[name] for name in ("success", "distance")}
            logged += [(steps, metric, float(value)) for metric, value in scores.items()]
            bar.set_postfix({key: format(scores[key], ".2f") for key in ("success", "distance", "return")})
            add_results(args.results, [(*key, *entry) for entry in logged])
            if agent.moves == moves or agent.moves // every % args.checkpoint_every == 0:
                checkpoint = {"script": "shaping", "args": identity, "agent": agent.state(), "logged": [list(entry) for entry in logged]}
                write_atomically(path, lambda file: torch.save(checkpoint, file))
    bar.close()
    print(", ".join(f"{metric} {value:.3f}" for step, metric, value in logged if step == logged[-1][0]) + f"; rows in {args.results}")


def benchmark_sac(args, env, reward, scale, env_name, rounds=3, seconds=8.0):
    """Environment steps per CPU second of this SAC and of Stable-Baselines3's on the same ants, networks, batch and update ratio.

    Stable-Baselines3 gets as many ants, in its DummyVecEnv. They take turns; the best round of each counts.
    """
    try:
        from stable_baselines3 import SAC
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError:
        raise UsageError("--benchmark needs stable-baselines3; pip install it, or drop the flag") from None
    per_move = args.update_ratio * args.num_envs
    if per_move < 1 or per_move != int(per_move):
        raise UsageError(f"--benchmark needs a whole number of updates per step of all ants, not {per_move:g}")
    agent = Sac(args, env, reward, scale)
    while agent.updates < 2 * per_move:
        agent.step()
    peer = SAC("MlpPolicy", DummyVecEnv([lambda: antmaze.AntMazeEnv(env.name)] * args.num_envs), learning_rate=args.learning_rate,
               buffer_size=200_000, learning_starts=args.warmup, batch_size=args.batch_size, tau=args.tau, gamma=args.gamma,
               train_freq=1, gradient_steps=int(per_move), ent_coef=args.alpha, policy_kwargs={"net_arch": [args.hidden] * 2},
               seed=0, device="cpu")
    peer.learn(args.warmup + 2 * args.num_envs)
    chunk, best = 8 * args.num_envs, {}

    def ours():
        for _ in range(8):
            agent.step()

    def theirs():
        peer.learn(chunk, reset_num_timesteps=False)

    for _ in range(rounds):
        for name, run in (("evaluate.py", ours), ("Stable-Baselines3", theirs)):
            count, begin = 0, time.process_time()
            while time.process_time() - begin < seconds:
                run()
                count += chunk
            best[name] = max(best.get(name, 0.0), count / (time.process_time() - begin))
    ratio = best["evaluate.py"] / best["Stable-Baselines3"]
    print(", ".join(f"{name} {value:,.0f}" for name, value in best.items()) + f" environment steps per CPU second: {ratio:.2f} times")
    setting = f"shaping-speed-ratio{args.update_ratio:g}-batch{args.batch_size}-ants{args.num_envs}"
    rows = [(setting, name, env_name, args.seed, 0, "steps_per_cpu_second", value) for name, value in best.items()]
    add_results(Path(args.results).with_name("antmaze_shaping_speed.csv"), rows)


# ================================================================================================= skills: a sparse task
# What the paper leaves open: returns are divided by the episode's length, so that the entropy coefficient has a meaning; the critic is
# a network of the policy's shape that also sees the time left. An ant on its back stays there until its episode ends; one whose physics
# diverged goes on from s0. A DCO option can be chosen where it may start, or any where none may; it runs for one step at least.
@dataclass
class Skills:
    """Do frozen skills solve the maze? A fresh high-level policy over them learns the sparse task; also what they cover without a task."""

    run: Optional[str] = None
    """run directory of tatc.py or baselines_dco_diayn.py on an ant maze, or its checkpoint"""
    floor: Optional[Literal["actions", "skills"]] = None
    """instead of --run: eight times uniformly random actions, or eight skills of an untrained network"""
    env: Optional[str] = None
    """antmaze1, antmaze2 or ant:FILE; default: the run's, or antmaze1"""
    method: Optional[str] = None
    """name in the rows; default from the run"""
    seed: int = 0
    """seed of the high level and its ants; the rows' seed is 100 times the run's plus this"""
    num_skills: int = 8
    """skills that the run must have"""
    episodes: int = 1600
    """training episodes"""
    batch: int = 8
    """episodes per update, side by side"""
    horizon: int = 1000
    """steps per episode"""
    skill_length: int = 200
    """steps per choice of a skill"""
    hidden: int = 128
    """units in each of the two hidden tanh layers"""
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
    results: str = "results/antmaze_skills.csv"
    """file to which the rows go"""


def tatc_skills(pi_low, num_skills):
    """pi_low's state_dict in the form of baselines_dco_diayn.py's "skills": a direction's term joins the first layer's bias."""
    if not {"weight_obs", "weight_extra", "bias", "obs_scale", "middle.weight", "out.weight"} <= set(pi_low):
        raise UsageError("the checkpoint's pi_low is not a network of tatc.py on the ants")
    angles = 2 * np.pi * torch.arange(num_skills) / num_skills
    omega = torch.zeros(num_skills, len(pi_low["weight_extra"]))
    omega[:, 0], omega[:, 1] = angles.cos(), angles.sin()
    return {"kind": "index", "num_skills": num_skills, "obs_scale": pi_low["obs_scale"], "activation": "tanh",
            "weights": [pi_low["weight_obs"][None], pi_low["middle.weight"].T[None], pi_low["out.weight"].T[None]],
            "biases": [pi_low["bias"] + omega @ pi_low["weight_extra"], pi_low["middle.bias"][None], pi_low["out.bias"][None]]}


class FrozenSkills:
    """Skills of a checkpoint, in numpy: `act` on the ants, and for options `may_start` and `ended`.

    entry: weights, a list of [k or 1, in, out], and biases of [k or 1, out], one each per layer, 1 when all skills share it; obs_scale
    [29]; activation between layers. kind "index": out [40] are logits of 5 values for each of 8 torques; "tanh": out [8];
    "tanh_gaussian": out [16], mean and log standard deviation; "actions": no network, uniform actions. f_weights, f_biases and threshold
    [k]: option z may start where f_z > threshold[z] and ends elsewhere.
    """

    def __init__(self, entry):
        self.kind, self.num_skills, self.scale = entry["kind"], entry["num_skills"], None
        if self.kind not in ("index", "tanh", "tanh_gaussian", "actions"):
            raise UsageError(f"skills of kind {self.kind!r} do not act on ants")
        if self.kind != "actions":
            self.scale = entry["obs_scale"].numpy()
            self.activation = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0)}[entry["activation"]]
            self.policy = self.layers(entry, "weights", "biases")
        self.threshold = entry["threshold"].numpy() if "threshold" in entry else None
        if self.threshold is not None:
            self.f = self.layers(entry, "f_weights", "f_biases")

    def layers(self, entry, weights, biases):
        found = [(weight.float().numpy(), bias.float().numpy()) for weight, bias in zip(entry[weights], entry[biases], strict=True)]
        if any(len(array) not in (1, self.num_skills) for layer in found for array in layer):
            raise UsageError(f"the checkpoint's skills are damaged: layers of other than {self.num_skills} skills")
        return found

    def outputs(self, layers, obs, skill):
        """Output [n, out] of the networks of skill [n] at obs [n, 29]."""
        if any(len(weight) > 1 for weight, _ in layers):  # a network per skill
            out = np.empty((len(obs), layers[-1][0].shape[2]), np.float32)
            for z in np.unique(skill):
                mine = skill == z
                out[mine] = self.forward([(weight[z % len(weight)], bias[z % len(bias)]) for weight, bias in layers], obs[mine])
            return out
        return self.forward([(weight[0], bias[skill if len(bias) > 1 else 0]) for weight, bias in layers], obs)

    def forward(self, layers, obs):
        """Output [n, out] at obs [n, 29] of one network, or of one with a first bias [n, hidden] of each row's skill."""
        x = obs * self.scale
        for i, (weight, bias) in enumerate(layers):
            x = (self.activation(x) if i else x) @ weight + bias
        return x

    def act(self, obs, skill, rng):
        """What env.move takes: actions [n, 8] of skill [n] at obs [n, 29]."""
        if self.kind == "actions":
            return rng.integers(5, size=(len(obs), 8))
        out = self.outputs(self.policy, obs, skill)
        if self.kind == "index":
            logits = out.reshape(len(obs), 8, 5)
            return (logits - np.log(rng.standard_exponential(logits.shape, dtype=np.float32).clip(1e-30))).argmax(-1)  # Gumbel noise
        if self.kind == "tanh_gaussian":
            mean, log_std = np.split(out, 2, axis=1)
            out = mean + np.exp(log_std.clip(-5, 2)) * rng.standard_normal(mean.shape, dtype=np.float32)
        return np.tanh(out)

    def ended(self, obs, skill):
        """[n] bool: the option of ant n ends at obs [n, 29]; skills that are no options never do."""
        return np.zeros(len(obs), bool) if self.threshold is None else self.outputs(self.f, obs, skill)[:, 0] <= self.threshold[skill]

    def may_start(self, obs):
        """[n, k] bool: what can be chosen at obs [n, 29]; everything where nothing may start."""
        if self.threshold is None:
            return np.ones((len(obs), self.num_skills), bool)
        allowed = ~np.stack([self.ended(obs, np.full(len(obs), z)) for z in range(self.num_skills)], axis=1)
        return allowed | ~allowed.any(1, keepdims=True)


def run_skills(env, skills, choose, steps, length, rng):
    """Skills one after the other from where the ants are; yields obs [N, 29] after each step.

    choose(t, ants [m], obs [m, 29], allowed [m, k]) -> [m] is asked when a skill's `length` is over or its option has ended.
    """
    skill, left = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs, np.int64)
    for t in range(steps):
        ants = np.flatnonzero(left == 0)
        if len(ants):
            skill[ants], left[ants] = choose(t, ants, env.obs[ants], skills.may_start(env.obs[ants])), length
        obs = env.move(skills.act(env.obs, skill, rng))
        left -= 1
        left[skills.ended(obs, skill)] = 0
        yield obs


def random_choice(allowed, rng):
    """One of the skills allowed [m, k] for each of m ants, uniformly -> [m]."""
    return np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)


def covered_cells(env_name, skills, args, passed_on, repeats=8):
    """Mean share of the maze's cells that `rollouts` randomly chosen skills of skill_length steps visit, over `repeats`.

    passed_on: a skill starts where the last one ended, the first one at s0; otherwise each starts at s0.
    """
    chains, length = (1, args.rollouts) if passed_on else (args.rollouts, 1)
    env, rng = antmaze.make(env_name, repeats * chains, args.seed), np.random.default_rng(args.seed)
    visited = np.zeros((repeats, env.num_cells), bool)
    group = np.repeat(np.arange(repeats), chains)
    visited[group, env.cell(env.obs)] = True

    def choose(t, ants, obs, allowed):
        return random_choice(allowed, rng)

    for obs in run_skills(env, skills, choose, length * args.skill_length, args.skill_length, rng):
        visited[group, env.cell(obs)] = True
    return visited.mean()


def choice_loss(logits, allowed, choice, value, returns, entropy_coef):
    """A2C with Monte-Carlo returns [n]: logits and allowed [n, k], choice [n], value [n] of the critic."""
    log_pi = F.log_softmax(logits.masked_fill(~allowed, -1e9), dim=-1)
    log_prob, entropy = log_pi.gather(1, choice[:, None]).squeeze(1), -(log_pi.exp() * log_pi).sum(1)
    policy_loss = -(log_prob * (returns - value.detach())).mean() - entropy_coef * entropy.mean()
    return policy_loss + (returns - value).square().mean()


def high_level_episodes(args, env, skills, policy, rng):
    """One episode of each ant from s0 -> (choices, rewards [T, N]).

    choices: obs [n, 29], allowed [n, k], choice [n], time left [n, 1] as a share, and return to go [n] as a share of the horizon.
    """
    env.place(np.ones(env.num_envs, bool), "s0")
    asked = []

    def choose(t, ants, obs, allowed):
        with torch.no_grad():
            logits = policy(torch.as_tensor(obs)).numpy()
        choice = np.where(allowed, logits + rng.gumbel(size=logits.shape), -np.inf).argmax(1)
        asked.append((np.full(len(ants), t), ants, obs, allowed, choice))
        return choice

    rewards = np.array([within_goal(obs, env) for obs in run_skills(env, skills, choose, args.horizon, args.skill_length, rng)], np.float32)
    when, ants, obs, allowed, choice = map(np.concatenate, zip(*asked))
    to_go = rewards[::-1].cumsum(0)[::-1] / args.horizon
    time_left = (1 - when[:, None] / args.horizon).astype(np.float32)
    return [torch.as_tensor(array) for array in (obs, allowed, choice, time_left, to_go[when, ants])], rewards


def load_skills(args):
    """(skills, name of the maze file or built-in, its name in the rows, method, the run's seed) of --run or --floor."""
    if (args.run is None) == (args.floor is None):
        raise UsageError("give either --run RUN_DIR or --floor")
    if args.floor is not None:
        env, env_name = ant_maze(args.env, None, 1, 0)
        entry = {"kind": "actions", "num_skills": args.num_skills}
        if args.floor == "skills":
            torch.manual_seed(args.seed)
            entry = tatc_skills(Net(29, 2, 40, 128, env.obs_scale).state_dict(), args.num_skills)
        return FrozenSkills(entry), env.name, env_name, args.method or f"random {args.floor}", 0
    checkpoint, run_args = load_run(args.run)
    env, env_name = ant_maze(args.env, run_args, 1, 0)
    if checkpoint.get("skills"):
        entry = checkpoint["skills"]
    elif any(key.startswith("pi_low.") for key in checkpoint.get("networks", ())):
        entry = tatc_skills(part_of(checkpoint["networks"], "pi_low"), run_args["num_directions"])
    else:
        raise UsageError(f"{args.run} is not a skills checkpoint; give a run of tatc.py or baselines_dco_diayn.py")
    if entry["num_skills"] != args.num_skills:
        raise UsageError(f"{args.run} has {entry['num_skills']} skills, not {args.num_skills}; finish its training or give --num-skills")
    return FrozenSkills(entry), env.name, env_name, args.method or method_name(run_args), run_args["seed"]


def evaluate_skills(args):
    """The body of `skills`."""
    torch.set_num_threads(1)
    for name in ("num_skills", "episodes", "batch", "horizon", "skill_length", "hidden", "log_every", "rollouts"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least 1")
    for name in ("entropy_coef", "learning_rate"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a non-negative number")
    if not 0 <= args.seed < 100:
        raise UsageError(f"--seed is {args.seed}; use 0 to 99")
    skills, maze, env_name, method, run_seed = load_skills(args)
    row_seed = 100 * run_seed + args.seed
    print(f"skills of {method} on {env_name}, run {run_seed}, seed {args.seed}, rows to {args.results}")
    if args.resume and finished(args.results, args.episodes, "skills", method, env_name, row_seed):
        return print("finished already")
    cells = {name: covered_cells(maze, skills, args, passed_on) for name, passed_on in (("cells", False), ("cells_passed_on", True))}
    print(", ".join(f"{name} {value:.3f}" for name, value in cells.items()))

    torch.manual_seed(args.seed)
    env, rng = antmaze.make(maze, args.batch, args.seed), np.random.default_rng(args.seed)
    policy, critic = Net(29, 0, args.num_skills, args.hidden, env.obs_scale), Net(29, 1, 1, args.hidden, env.obs_scale)
    optimizer = torch.optim.RMSprop([*policy.parameters(), *critic.parameters()], lr=args.learning_rate, foreach=True)
    logged, success, returns = [], [], []
    updates = -(-args.episodes // args.batch)
    bar = tqdm(range(1, updates + 1), unit="update", dynamic_ncols=True)
    for number in bar:
        (obs, allowed, choice, time_left, to_go), rewards = high_level_episodes(args, env, skills, policy, rng)
        success.append(rewards.any(0).mean())
        returns.append(rewards.sum(0).mean())
        if number % args.log_every == 0 or number == updates:
            logged += [(number * args.batch, "success", np.mean(success)), (number * args.batch, "return", np.mean(returns))]
            bar.set_postfix(success=f"{logged[-2][2]:.2f}", reward=f"{logged[-1][2]:.1f}")
            success, returns = [], []
        loss = choice_loss(policy(obs), allowed, choice, critic(obs, time_left).squeeze(-1), to_go, args.entropy_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rows = [("skills-cells", method, env_name, row_seed, 0, *entry) for entry in cells.items()]
    add_results(args.results, rows + [("skills", method, env_name, row_seed, *entry) for entry in logged])
    print(f"success {logged[-2][2]:.3f}, return {logged[-1][2]:.1f}, {env.diverged} ants diverged; rows in {args.results}")


# ================================================================================================= figures and tables
@dataclass
class Figures:
    """Redraw the figures and the README's tables from the result rows."""

    results_dir: str = "results"
    """directory of the result files; the pictures go to its subdirectory figures"""
    readme: str = "README.md"
    """file with the tables, each between <!-- table:NAME --> and <!-- end -->"""


def student_interval(values):
    """Mean and half width of the 95% Student interval of values [n]; the half width of a single value is nan."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return values.mean(), np.nan
    return values.mean(), scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))


def ranked(names, order):
    """names in the given order, unknown ones last."""
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def curves_of(rows, experiment, metric):
    """{env: {method: {seed: (steps, values)}}} of one experiment and metric."""
    found = {}
    for row in rows:
        if row["experiment"] == experiment and row["metric"] == metric:
            seeds = found.setdefault(row["env"], {}).setdefault(row["method"], {})
            steps, values = seeds.setdefault(int(row["seed"]), ([], []))
            steps.append(float(row["step"]))
            values.append(float(row["value"]))
    return {env: {method: found[env][method] for method in ranked(found[env], list(COLOURS))}
            for env in ranked(found, list(gridworld.MAZES))}


def final_value(steps, values):
    """One seed's score: the mean over the last tenth of training."""
    steps, values = np.asarray(steps), np.asarray(values)
    return values[steps > 0.9 * steps.max()].mean() if steps.max() > 0 else values[-1]


def draw_curves(path, panels, x_label, title):
    """A row per panel, a column per maze; panels [(curves of `curves_of`, y label, y limits or None)], empty ones left out."""
    panels = [panel for panel in panels if panel[0]]
    if not panels:
        return
    mazes = list(dict.fromkeys(env for curves, _, _ in panels for env in curves))
    figure = Figure(figsize=(max(9, 4.2 * len(mazes)), 2.7 * len(panels) + 1.4), layout="constrained")
    handles, counts = {}, set()
    for row, (curves, y_label, limits) in zip(figure.subplots(len(panels), len(mazes), squeeze=False), panels):
        for ax, env in zip(row, mazes):
            if env not in curves:
                ax.axis("off")
                continue
            for method, seeds in curves[env].items():
                length = min(len(steps) for steps, _ in seeds.values())
                steps = next(iter(seeds.values()))[0][:length]
                mean, half = np.transpose([student_interval(point) for point in zip(*(values[:length] for _, values in seeds.values()))])
                name, _, reward = method.partition(", ")
                colour, both = COLOURS.get(name, "0.3"), reward == "dense" and f"{name}, mix" in curves[env]
                style = "--" if name in DASHED else ":" if both else "-"
                handles[method], = ax.plot(steps, mean, style, color=colour, linewidth=1.5)
                if len(seeds) > 1:
                    ax.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
                if len(seeds) <= 3:  # an interval of so few says less than they do
                    for each in seeds.values():
                        ax.plot(*each, color=colour, linewidth=0.7, alpha=0.6)
                counts.add(len(seeds))
            ax.set(title=env, xlabel=x_label, ylim=limits or (0, 1.1 * ax.dataLim.y1))
            ax.grid(alpha=0.3)
        row[0].set_ylabel(y_label)
    number = "-".join(map(str, sorted({min(counts), max(counts)})))
    thin = "; thin: single seeds, where at most 3" if min(counts) <= 3 else ""
    figure.suptitle(f"{title}\nSeeds: {number}; shaded: 95% Student interval{thin}.", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)), fontsize=9)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def table_of(columns, order=tuple(COLOURS)):
    """Markdown table of final scores, a row per method. columns: {(heading, env): {method: {seed: (steps, values)}}}."""
    methods = ranked({method for cells in columns.values() for method in cells}, list(order))
    lines = ["| method | " + " | ".join(f"{env}, {heading}" for heading, env in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in methods:
        cells = []
        for values in columns.values():
            if method not in values:
                cells.append("")
                continue
            scores = [final_value(*curve) for curve in values[method].values()]
            mean, half = student_interval(scores)
            cells.append(f"{mean:.3f}" + (f" ± {half:.3f}" if half == half else "") + f" ({len(scores)})")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fill_tables(readme, tables):
    """Put each table between its markers; tables that the file has no markers for are left out, and named."""
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- table:{re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
        print(f"table {name}: " + (f"{readme} has no <!-- table:{name} --> ... <!-- end -->" if not count else f"in {readme}"))
    if readme.exists():
        write_atomically(readme, lambda file: file.write(text.encode()))


def spread_table(rows, first_column, entries, metrics, last_step=np.inf):
    """Markdown table of the last scores over seeds, median [min, max]. entries: [(label, method, env)]; metrics: {name: heading}."""
    lines = [f"| {first_column} | seeds | " + " | ".join(metrics.values()) + " |", "|---" * (len(metrics) + 2) + "|"]
    for label, method, env in entries:
        last = {}
        for row in rows:
            if row["method"] == method and row["env"] == env and int(row["step"]) <= last_step:
                last[row["metric"], row["seed"]] = float(row["value"])  # rows are in the order of steps
        seeds = sorted({seed for _, seed in last})
        cells = []
        for metric in metrics if seeds else ():
            values = [last[metric, seed] for seed in seeds if (metric, seed) in last]
            if not values:
                cells.append("never" if metric == "far_end_steps" else "")
                continue
            median, low, high = (f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}" for value in (np.median(values), min(values), max(values)))
            cells.append(f"{median} [{low}, {high}]" if len(values) > 1 else median)
        if seeds:
            lines.append(f"| {label} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tatc_figures(results_dir):
    """phi of the three mazes, its progress and the ablations, from committed phi.npz files; {name: table} of the scores."""
    rows = read_results(results_dir / "gridworld_tatc.csv")
    if not rows:
        return {}
    figures = results_dir / "figures"
    figures.mkdir(exist_ok=True)
    envs = {name: gridworld.make(name, 1, 0) for name in gridworld.MAZES}

    def path(env, variant):
        return results_dir / "phi" / f"tatc-{env}-{variant}-seed0.npz"

    variants = {"s0": "full", "s0-boredom0-entropy0.1": "beta' = 0, entropy coefficient 0.1", "s0-boredom0": "beta' = 0",
                "uniform-boredom0": "beta' = 0, uniform prior"}
    absent = [path(env, variant) for env in envs for variant in variants if not path(env, variant).exists()]
    if absent:
        print(f"figures of gridworld representations left out: there is no {absent[0]}")
    else:
        figure = Figure(figsize=(10, 6.2), layout="constrained")
        axes = figure.subplots(2, 3, height_ratios=(1, 1.25))
        for column, (name, env) in zip(axes.T, envs.items()):
            gridworld.draw_maze(column[0], env)
            column[0].set_title({"umaze": "U-Maze", "tmaze": "T-Maze", "4rooms": "4-rooms"}[name])
            gridworld.draw_phi(column[1], env, np.load(path(name, "s0"))["phi"])
        figure.savefig(figures / "representations.png", dpi=90)

        stages = len(np.load(path("umaze", "s0"))["stages"])
        figure = Figure(figsize=(2.1 * (stages + 1), 6.6), layout="constrained")
        for row, (name, env) in zip(figure.subplots(3, stages + 1), envs.items()):
            gridworld.draw_maze(row[0], env)
            file = np.load(path(name, "s0"))
            for ax, phi, stage in zip(row[1:], file["snapshots"], file["stages"]):
                gridworld.draw_phi(ax, env, phi)
                ax.set_title(f"update {stage}", fontsize=9)
        figure.savefig(figures / "progress.png", dpi=80)

        figure = Figure(figsize=(11, 8.4), layout="constrained")
        for row, (name, env) in zip(figure.subplots(3, 4), envs.items()):
            for ax, (variant, title) in zip(row, variants.items()):
                gridworld.draw_phi(ax, env, np.load(path(name, variant))["phi"])
                ax.set_title(f"{name}: {title}", fontsize=8)
        figure.savefig(figures / "ablation.png", dpi=80)
        print(f"figures: {figures}/representations.png, progress.png, ablation.png")

    speed = {row["method"]: float(row["value"]) for row in read_results(results_dir / "gridworld_speed.csv")}
    scores = {"spearman_all": "Spearman, all pairs", "spearman_s0": "Spearman, from s0", "coverage": "coverage", "far": "far"}
    ablations = {"TATC": "full", "TATC boredom=0": "beta' = 0", "TATC entropy=0.1": "full, entropy coefficient 0.1 (paper)",
                 "TATC boredom=0 entropy=0.1": "beta' = 0, entropy coefficient 0.1 (paper)",
                 "TATC uniform boredom=0": "beta' = 0, uniform prior"}
    readings = {"TATC": "mean of squared norms (D1)", "TATC boredom squared_sum": "sum of squared norms",
                "TATC boredom mean": "mean of norms", "TATC boredom sum": "sum of norms (literal)"}
    return {
        "gridworld": spread_table(rows, "maze", [(env, "TATC", env) for env in envs], scores),
        "ablation": spread_table(rows, "maze and objective", [(f"{env}: {label}", method, env) for env in envs
                                                              for method, label in ablations.items()], scores),
        "readings": spread_table(rows, "reading of Eq. 5", [(label, method, "umaze") for method, label in readings.items()],
                                 {"extent": "extent of phi"} | scores, last_step=4000 * 2880),
        "own": spread_table(rows, "maze", [(env, "TATC", env) for env in ("spiral", "rooms6")], scores),
        "gridworld-speed": "\n".join(["| one update of U-Maze | CPU ms | against tatc.py |", "|---|---|---|"] + [
            f"| {name} | {value:.1f} | {value / speed['ours']:.2f}x |" for name, value in speed.items()]),
    }


def antmaze_representations(results_dir):
    """phi of the ant mazes for each seed, its progress, and traces of the skills, from committed files; {name: table} of the scores."""
    rows = read_results(results_dir / "antmaze_tatc.csv")
    if not rows:
        return {}
    figures = results_dir / "figures"
    figures.mkdir(exist_ok=True)
    runs = {name: sorted((results_dir / "phi").glob(f"tatc-{name}-s0-seed?.npz")) for name in antmaze.MAZES}
    runs = {name: paths for name, paths in runs.items() if paths}
    if runs:
        envs = {name: antmaze.make(name, 1, 0) for name in runs}
        columns = max(map(len, runs.values()))
        figure = Figure(figsize=(2.6 * (columns + 1), 2.8 * len(runs)), layout="constrained")
        for row, (name, paths) in zip(figure.subplots(len(runs), columns + 1, squeeze=False), runs.items()):
            antmaze.draw_maze(row[0], envs[name])
            row[0].scatter(*envs[name].truth_xy.T, c=envs[name].distance[envs[name].start_index], cmap="viridis", s=5)
            row[0].set_title(name, fontsize=9)
            for ax in row[1 + len(paths):]:
                ax.axis("off")
            for ax, path in zip(row[1:], paths):
                antmaze.draw_phi(ax, envs[name], np.load(path)["phi"])
                ax.set_title(path.stem.split("-")[-1].replace("seed", "seed "), fontsize=9)
                ax.tick_params(labelsize=7)
        figure.savefig(figures / "antmaze_representations.png", dpi=90)

        stages = {name: np.load(paths[0]) for name, paths in runs.items()}
        columns = max(len(file["stages"]) for file in stages.values())
        figure = Figure(figsize=(2.1 * columns, 2.4 * len(runs)), layout="constrained")
        for row, (name, file) in zip(figure.subplots(len(runs), columns, squeeze=False), stages.items()):
            for ax in row[len(file["stages"]):]:
                ax.axis("off")
            for ax, phi, stage in zip(row, file["snapshots"], file["stages"]):
                antmaze.draw_phi(ax, envs[name], phi)
                ax.set_title(f"{name}, update {stage}", fontsize=8)
                ax.tick_params(labelsize=6)
        figure.savefig(figures / "antmaze_progress.png", dpi=80)

        figure = Figure(figsize=(4.5 * len(runs), 4.5), layout="constrained")
        for ax, (name, paths) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items()):
            antmaze.draw_maze(ax, envs[name])
            for skill, traces in enumerate(tatc_traces(results_dir / "checkpoints" / f"{paths[0].stem}.pt")):
                for trace in traces:
                    ax.plot(*trace.T, color=f"C{skill}", lw=1, alpha=0.8)
                    ax.plot(*trace[-1], "o", color=f"C{skill}", ms=3)
            ax.set_title(f"{name}: 100 steps of each skill from 12 places", fontsize=9)
        figure.savefig(figures / "antmaze_traces.png", dpi=80)
        print(f"figures: {figures}/antmaze_representations.png, antmaze_progress.png, antmaze_traces.png")
    for row in rows:
        if row["metric"] == "far_end_steps":
            row["value"] = str(float(row["value"]) / 1e6)
    scores = {"updates": "updates", "spearman_all": "Spearman, all pairs", "spearman_s0": "Spearman, from s0", "coverage": "coverage",
              "far": "far", "far_end_steps": "million steps to the far end", "skills_travel": "positions where, from rest, a skill travels 3 units",
              "skills_used": "skills that do", "skills_travel_on": "cells where, from an ant's state, a skill does",
              "skills_used_on": "skills that do so", "reaches_end": "at the far end in 1000 steps"}
    methods = {"TATC": "full", "TATC anneal=0": "constant step sizes", "TATC boredom=0 anneal=0": "beta' = 0, constant step sizes",
               "TATC boredom=0 memory=1": "beta' = 0, no memory", "TATC a2c": "vanilla A2C", "TATC memory=1": "no memory",
               "TATC memory=1 a2c": "vanilla A2C, no memory", "TATC gap=1": "pairs one step apart"}
    return {"antmaze": spread_table(rows, "maze", [(f"{env}: {label}", method, env) for env in antmaze.MAZES
                                                   for method, label in methods.items()], scores)}


def tatc_traces(path, places=12, steps=100):
    """xy [k, places, steps + 1, 2] of every skill of a checkpoint of tatc.py, from places spread over the distances from s0."""
    checkpoint, run_args = load_run(path)
    skills = FrozenSkills(tatc_skills(part_of(checkpoint["networks"], "pi_low"), run_args["num_directions"]))
    env, _ = ant_maze(None, run_args, skills.num_skills * places, 0)
    order = np.argsort(env.distance[env.start_index], kind="stable")[np.linspace(0, len(env.truth_obs) - 1, places).astype(int)]
    env.place(np.ones(env.num_envs, bool), np.tile(env.truth_obs[order], (skills.num_skills, 1)))
    skill = np.repeat(np.arange(skills.num_skills), places)
    states = [env.obs, *run_skills(env, skills, lambda t, ants, obs, allowed: skill[ants], steps, steps, env.np_random)]
    return np.stack([obs[:, :2] for obs in states], axis=1).reshape(skills.num_skills, places, steps + 1, 2)


def antmaze_tables(results_dir):
    """{name: table} of the ant simulator's speed and physics, and of the trials that led to the defaults."""
    tables = {}
    rows = read_results(results_dir / "antmaze_speed.csv")
    if rows:
        cost = {}  # {(name, ants, threads): {clock: [microseconds per env step of each run]}}
        for row in rows:
            clock, _, ants, threads = row["metric"].split("_")
            key = row["method"], int(ants[:-4]), int(threads[:-7])
            cost.setdefault(key, {}).setdefault(clock, []).append(float(row["value"]))
        lines = ["| | ants | threads | CPU µs per env step | wall µs per env step | CPU cost against antmaze.py |", "|---" * 6 + "|"]
        for (name, ants, threads), value in sorted(cost.items(), key=lambda item: (item[0][1:], np.median(item[1]["cpu"]))):
            ratios = np.array(value["cpu"]) / cost["antmaze.py", ants, threads]["cpu"]  # within each run
            lines.append(f"| {name} | {ants} | {threads} | {np.median(value['cpu']):.1f} | {np.median(value['wall']):.1f} | "
                         f"{np.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}] |")
        faster = np.array(cost["antmaze.py", 64, 1]["wall"]) / cost["antmaze.py", 64, 2]["wall"]
        lines.append(f"\nMedian [min, max] of {len(faster)} runs. 64 ants on two threads: {np.median(faster):.2f} "
                     f"[{min(faster):.2f}, {max(faster):.2f}] times the wall-clock speed of one.")
        tables["antmaze-speed"] = "\n".join(lines)
    rows = read_results(results_dir / "antmaze_training_speed.csv")
    if rows:
        speed = {name: np.array([float(row["value"]) for row in rows if row["method"] == name])
                 for name in ("tatc.py, whole loop", "mujoco.batch, same model")}
        ratios = np.divide(*speed.values())
        tables["antmaze-training-speed"] = (
            f"The whole training loop runs at {np.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] of the speed of mujoco.batch "
            f"alone on the same model (median [range] of {len(ratios)} blocks in turn, CPU time, one core).")
    rows = read_results(results_dir / "antmaze_trials.csv")
    if rows:
        entries = dict.fromkeys((row["method"], row["env"]) for row in rows)
        tables["trials"] = spread_table(rows, "setting", [(f"{env}: {method}", method, env) for method, env in entries], {
            "updates": "updates", "coverage": "coverage", "reached": "furthest reached", "spearman_all": "Spearman, all pairs",
            "spearman_s0": "Spearman, from s0", "skill_reward": "skill reward", "extent": "extent of phi"})
    rows = read_results(results_dir / "antmaze_shaping_trials.csv")
    if rows:
        headings = {"success": "success", "sampled_success": "of the sampled policy", "distance": "distance to the goal",
                    "sampled_distance": "of the sampled policy", "flipped": "on their back"}
        lines = ["| setting | steps | " + " | ".join(headings.values()) + " | least distance |", "|---" * (len(headings) + 3) + "|"]
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if row["method"] == method]
            last = {row["metric"]: float(row["value"]) for row in mine}  # rows are in the order of steps
            least = min(float(row["value"]) for row in mine if row["metric"] == "distance")
            cells = [f"{last[name]:.2f}" if name in last else "" for name in headings]
            lines.append(f"| {method} | {max(int(row['step']) for row in mine):,} | " + " | ".join(cells) + f" | {least:.2f} |")
        tables["shaping-trials"] = "\n".join(lines)
    rows = read_results(results_dir / "antmaze_physics.csv")
    if rows:
        columns = {"resting_height": "resting height", "distance_mean": "distance", "distance_stderr": "its standard error",
                   "flipped_at_end": "on their back at the end", "left_start_block": "out of the start block"}
        values = {(row["method"], row["metric"]): row["value"] for row in rows}
        lines = ["| 256 ants, 500 random steps | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(f"{float(values[name, metric]):.3f}" for metric in columns) + " |"
                  for name in dict.fromkeys(row["method"] for row in rows)]
        tables["antmaze-physics"] = "\n".join(lines)
    return tables


def gridworld_figures(results_dir):
    """The figures of prediction and control; returns {name: table} of these and of Lap-rep's scores."""
    tables = {}

    def table(name, rows, experiment, **headings):
        found = {(heading, env): cells for metric, heading in headings.items()
                 for env, cells in curves_of(rows, experiment, metric).items()}
        if found:
            tables[name] = table_of(found)

    rows = read_results(results_dir / "gridworld_prediction.csv")
    table("fit", rows, "fit", fit_r2="R²", fit_error="RMSE")
    table("prediction", rows, "prediction-uniform", error_optimal="error to V*", error_policy="error to V^π")
    panels = [(curves_of(rows, "prediction-uniform", metric), f"error to {name}", None)
              for metric, name in (("error_optimal", "V*"), ("error_policy", "V^π"))]
    draw_curves(results_dir / "figures" / "gridworld_prediction.png", panels, "A2C updates of 80 episodes",
                "Prediction: root mean square error of a linear critic on frozen phi, uniform starts.\n"
                "The paper: TATC outperforms Lap-rep (s0) and recovers the expressive power of Lap-rep (uniform).")
    rows = read_results(results_dir / "gridworld_control.csv")
    table("control", rows, "control-uniform", reward="reward", discounted_return="discounted return")
    panels = [(curves_of(rows, "control-uniform", "reward"), "episode reward", (-0.03, 1.03)),
              (curves_of(rows, "control-uniform", "discounted_return"), "discounted return", (0, None))]
    draw_curves(results_dir / "figures" / "gridworld_control.png", panels, "A2C updates of 80 episodes",
                "Control: an actor-critic on frozen phi, uniform starts.\nThe paper: TATC consistently outperforms Lap-rep (s0).")
    rows = read_results(results_dir / "laprep.csv")
    if rows:
        found = {(row["env"], row["method"]) for row in rows}
        order = [(env, method) for env in ranked({env for env, _ in found}, list(gridworld.MAZES))
                 for method in ranked({method for other, method in found if other == env}, list(COLOURS))]
        tables["laprep"] = spread_table(rows, "maze and method", [(f"{env}: {method}", method, env) for env, method in order], {
            "spearman_all": "Spearman, all pairs", "spearman_s0": "Spearman, from s0", "subspace": "subspace", "cosine": "cosine",
            "cosine_near": "cosine, near eigenvalues as one"})
    return tables


def smooth(curves, keep=0.9, unit=10_000):
    """The curves of `curves_of` exponentially smoothed: y_0 = x_0, and from point to point y keeps the share `keep` per `unit` steps."""

    def smoothed(steps, values):
        result = [values[0]]
        for gap, value in zip(np.diff(steps), values[1:]):
            result.append(value + keep ** (gap / unit) * (result[-1] - value))
        return steps, result

    return {env: {method: {seed: smoothed(*curve) for seed, curve in seeds.items()} for method, seeds in methods.items()}
            for env, methods in curves.items()}


def antmaze_figures(results_dir):
    """The figures of shaping and skills; returns {name: table}."""
    tables, rows = {}, read_results(results_dir / "antmaze_shaping.csv")

    panels, columns = [], {}
    for metric, label, limits in (("success", "success rate", (-0.03, 1.03)), ("sampled_success", "that of the sampled policy", None),
                                  ("distance", "final distance to the goal", (0, 58))):
        for reward in ("dense", "mix", "sparse", "xy"):
            for env, methods in curves_of(rows, f"shaping-{reward}", metric).items():
                columns.setdefault((label, env), {}).update(
                    {method if method == reward else f"{method}, {reward}": seeds for method, seeds in methods.items()})
        if limits:
            panels.append((smooth({env: methods for (name, env), methods in sorted(columns.items()) if name == label}), label, limits))
    draw_curves(results_dir / "figures" / "antmaze_shaping.png", panels, "environment steps",
                "Reward shaping: SAC on distances in phi, smoothed by 0.9 per 10,000 steps.\n"
                "The paper (5 million steps): TATC does as well as Lap-rep (uniform) or better.")
    if columns:
        names = [name for method in COLOURS for name in (f"{method}, dense", f"{method}, mix", method)]
        tables["shaping"] = table_of(dict(sorted(columns.items(), key=lambda item: item[0][1])), names)
    rows = read_results(results_dir / "antmaze_skills.csv")
    names = {"success": "success rate", "return": "return"}
    panels = [(curves_of(rows, "skills", metric), label, (0, None)) for metric, label in names.items()]
    draw_curves(results_dir / "figures" / "antmaze_skills.png", panels, "episodes",
                "A new high-level policy over frozen skills, sparse reward; a point is the mean of 80 episodes.\n"
                "The paper: TATC's skills quickly solve the task, DCO's and DIAYN's do not.")
    names = {("skills", "success"): "success rate", ("skills", "return"): "return",
             ("skills-cells", "cells"): "cells of 48 skills from s0", ("skills-cells", "cells_passed_on"): "cells, state passed on"}
    columns = {(heading, env): cells for (experiment, metric), heading in names.items()
               for env, cells in curves_of(rows, experiment, metric).items()}
    if columns:
        tables["skills"] = table_of(columns)
    return tables


def draw_figures(args):
    """The body of `figures`."""
    results_dir = Path(args.results_dir)
    tables = tatc_figures(results_dir) | gridworld_figures(results_dir) | antmaze_representations(results_dir)
    tables |= antmaze_tables(results_dir) | antmaze_figures(results_dir)
    if not tables:
        raise UsageError(f"{results_dir} holds no result files; run another subcommand first")
    fill_tables(Path(args.readme), tables)


# ============================================================================================================= film
@dataclass
class Film:
    """An ant under the trained policies of tatc.py, from s0, as a strip of pictures (.png) and an animation (.gif). Needs OpenGL."""

    run: str
    """run directory of tatc.py on an ant maze, or its checkpoint"""
    path: str = "film.gif"
    """where the animation goes; the strip gets the ending .png"""
    seed: int = 0
    """seed of the ants; the first of 64 that comes within 4 units of the far end is shown, or the one that comes nearest"""
    steps: int = 1000
    """environment steps"""
    frames: int = 100
    """pictures of the animation"""
    size: int = 240
    """its height and width in pixels"""


def draw_film(args):
    """The body of `film`."""
    torch.set_num_threads(1)
    for name in ("steps", "frames", "size"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; use at least 1")
    checkpoint, run_args = load_run(args.run)
    env, _ = ant_maze(None, run_args, 64, args.seed)
    if not any(key.startswith("pi_hi.") for key in checkpoint.get("networks", ())):
        raise UsageError(f"{args.run} is not a run of tatc.py")
    skills = FrozenSkills(tatc_skills(part_of(checkpoint["networks"], "pi_low"), run_args["num_directions"]))
    pi_hi, rng = rebuild_network(part_of(checkpoint["networks"], "pi_hi")), np.random.default_rng(args.seed)

    def choose(t, ants, obs, allowed):
        return (pi_hi(torch.as_tensor(obs)).numpy() + rng.gumbel(size=allowed.shape)).argmax(1)

    states = np.stack([env.obs, *run_skills(env, skills, choose, args.steps, run_args["skill_length"], rng)])  # [T + 1, N, 29]
    far_end = env.truth_xy[env.distance[env.start_index].argmax()]
    distance = np.linalg.norm(states[..., :2] - far_end, axis=-1)  # [T + 1, N]
    arrived = (distance <= 4).any(0)
    ant = np.where(arrived, (distance <= 4).argmax(0), args.steps + distance.min(0)).argmin()
    last = (distance[:, ant] <= 4).argmax() if arrived[ant] else args.steps
    camera = antmaze.make(env.name, 1, 0, render_mode="rgb_array")
    pictures = []
    for t in np.linspace(0, last, args.frames).astype(int):
        camera.place(np.ones(1, bool), states[t, ant][None])
        try:
            pictures.append(Image.fromarray(camera.render()[0]).resize((args.size, args.size), Image.Resampling.LANCZOS))
        except RuntimeError as error:
            raise UsageError(str(error)) from None
    camera.close()
    pictures = [picture.quantize(64) for picture in pictures]
    path = Path(args.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=80, loop=0)
    figure = Figure(figsize=(10, 2.2), layout="constrained")
    for ax, share in zip(figure.subplots(1, 5), np.linspace(0, 1, 5)):
        ax.imshow(pictures[round(share * (args.frames - 1))].convert("RGB"))
        ax.set_title(f"step {round(share * last)}", fontsize=9)
        ax.axis("off")
    figure.savefig(path.with_suffix(".png"), dpi=90)
    print(f"{path} and {path.with_suffix('.png')}: {arrived.sum()} of 64 ants arrived within {args.steps} steps, this one "
          + (f"after {last}" if arrived[ant] else "did not"))


# ============================================================================================================= plan
EXPERIMENTS = ("gridworld", "ablation", "readings", "own", "laprep", "prediction", "control", "antmaze", "shaping", "skills")
# Budgets of seconds instead of minutes, for trying a plan out.
SMOKE = {"tatc.py": "--updates 6 --log-every 2 --checkpoint-every 2 --num-envs 4",
         "laprep.py": "--updates 40 --samples 4000 --log-every 20 --checkpoint-every 20",
         "baselines_dco_diayn.py dco": "--samples 2000 --f-updates 10 --policy-updates 10",
         "baselines_dco_diayn.py diayn": "--updates 200 --updates-per-step 1", "evaluate.py prediction": "--updates 20 --log-every 10",
         "evaluate.py control": "--updates 20 --log-every 10", "evaluate.py shaping": "--steps 2000 --eval-every 1000 --horizon 50",
         "evaluate.py skills": "--episodes 16 --horizon 40 --skill-length 10"}


@dataclass
class Plan:
    """Print the trainings and evaluations behind the figures: one shell command per line, with its core-minutes, as measured in short runs.

    A line needs lines of earlier stages only, so the lines of a stage may run side by side. Each continues where it was interrupted
    or finds itself finished: a plan that was killed is run again as it is.
    """

    experiment: Tuple[Literal[EXPERIMENTS], ...] = EXPERIMENTS
    """what to plan, with the trainings that it needs"""
    stage: Optional[Literal["train", "evaluate", "figures"]] = None
    """only these lines"""
    seeds: int = 5
    """seeds of the gridworld experiments; at most 3 of them for ablations and ants"""
    results_dir: str = "results"
    """where the rows go"""
    smoke: bool = False
    """budgets of seconds: tries the plan, not the methods"""


def plan_commands(args):
    """[(stage, command, core-minutes)] of a plan, in order, each command once."""
    lines, all_seeds, few_seeds = {}, range(args.seeds), range(min(args.seeds, 3))

    def add(stage, command, minutes):
        script = next((name for name in SMOKE if command.startswith(name)), None)
        smoke = f" {SMOKE[script]}" if args.smoke and script else ""
        lines.setdefault((stage, f"python {command}{smoke}"), minutes)

    def train(command, env, variant, seeds, minutes, results=None):
        """Trainings of the seeds; their scores go to `results`. Returns the run directories."""
        runs = []
        for seed in seeds:
            add("train", f"{command} --env {env} --seed {seed} --resume", minutes)
            method = command.split()[1] if command.startswith("baselines") else command.split(".")[0]
            runs.append(f"runs/{method}/{Path(env).stem}/{variant}/seed{seed}")
            if results:
                add("evaluate", f"evaluate.py scores --results {args.results_dir}/{results} --runs {runs[-1]}", 0.1)
        return runs

    def tatc(env, seeds=all_seeds):
        ant = env in antmaze.MAZES
        return train("tatc.py", env, "s0", seeds, 34 if ant else 2, "antmaze_tatc.csv" if ant else "gridworld_tatc.csv")

    def lap(env, prior, dim, seeds=all_seeds):
        minutes = 2.6 if env in antmaze.MAZES else 1.7
        return train(f"laprep.py --prior {prior} --dim {dim}", env, f"{prior}-d{dim}", seeds, minutes, "laprep.csv")

    for experiment in args.experiment:
        if experiment == "gridworld":
            for env in gridworld.MAZES:
                tatc(env)
        if experiment == "own":
            for env in ("results/spiral.txt", "results/rooms6.txt"):
                tatc(env, range(1))
        if experiment == "ablation":
            for env in gridworld.MAZES:
                for flags, variant in (("--boredom-coef 0", "s0-boredom0"), ("--boredom-coef 0 --prior uniform", "uniform-boredom0"),
                                       ("--low-entropy-coef 0.1", "s0-entropy0.1"),
                                       ("--boredom-coef 0 --low-entropy-coef 0.1", "s0-boredom0-entropy0.1")):
                    train(f"tatc.py {flags}", env, variant, few_seeds, 2, "gridworld_tatc.csv")
        if experiment == "readings":
            for reading in ("sum", "mean", "squared_sum"):
                train(f"tatc.py --updates 4000 --boredom {reading}", "umaze", f"s0-{reading}", few_seeds, 1.2, "gridworld_tatc.csv")
        if experiment in ("laprep", "prediction", "control"):
            for env in gridworld.MAZES:
                runs = [run for prior, dim in (("s0", 2), ("s0", 3), ("uniform", 2)) for run in lap(env, prior, dim)]
                if experiment != "laprep":
                    sources = [f"--run {run}" for run in tatc(env) + runs]
                    sources += [f"--features {name} --env {env} --seed {seed}" for name in ("exact", "onehot") for seed in all_seeds]
                    for source in sources:
                        results = f"{args.results_dir}/gridworld_{experiment}.csv"
                        add("evaluate", f"evaluate.py {experiment} {source} --resume --results {results}", 0.5)
        if experiment == "laprep":
            lap("results/maze19.txt", "uniform", 2, few_seeds)
            for env in ("4rooms", "results/maze19.txt"):
                train("laprep.py --objective allo --prior uniform --dim 11 --data offline --samples 200000 --updates 10000", env,
                      "uniform-d11-allo-offline", few_seeds, 2.5, "laprep.csv")
        if experiment == "antmaze":
            for env in antmaze.MAZES:
                tatc(env, few_seeds)
                train("tatc.py --updates 3000 --anneal 0", env, "s0-anneal0", few_seeds, 17, "antmaze_tatc.csv")
            train("tatc.py --boredom-coef 0 --updates 3000 --anneal 0", "antmaze1", "s0-boredom0-anneal0", few_seeds, 17, "antmaze_tatc.csv")
            train("tatc.py --skill-update a2c", "antmaze1", "s0-a2c", few_seeds, 40, "antmaze_tatc.csv")
        if experiment == "shaping":
            for env in antmaze.MAZES:
                runs = tatc(env, few_seeds) + lap(env, "uniform", 2, few_seeds) + lap(env, "s0", 2, few_seeds)
                sources = [f"--reward {reward} --run {run}" for reward in ("dense", "mix") for run in runs]
                sources += [f"--reward {reward} --env {env} --seed {seed}" for reward in ("sparse", "xy") for seed in few_seeds]
                for source in sources:
                    add("evaluate", f"evaluate.py shaping {source} --resume --results {args.results_dir}/antmaze_shaping.csv", 24)
        if experiment == "skills":
            runs = tatc("antmaze1", few_seeds)
            runs += train("baselines_dco_diayn.py dco", "antmaze1", "uniform", few_seeds, 50)
            runs += train("baselines_dco_diayn.py diayn", "antmaze1", "s0", few_seeds, 40)
            for source in [f"--run {run}" for run in runs] + ["--floor actions", "--floor skills"]:
                for seed in all_seeds:
                    add("evaluate", f"evaluate.py skills {source} --seed {seed} --resume --results {args.results_dir}/antmaze_skills.csv",
                        4.5 if "dco" in source else 2.5)
    add("figures", f"evaluate.py figures --results-dir {args.results_dir}", 1)
    order = ("train", "evaluate", "figures")
    lines = [(stage, command, minutes) for (stage, command), minutes in lines.items() if args.stage in (None, stage)]
    return sorted(lines, key=lambda line: order.index(line[0]))


def print_plan(args):
    """The body of `plan`; the total goes to stderr, so that stdout is a file of commands."""
    if args.seeds < 1:
        raise UsageError(f"--seeds is {args.seeds}; use at least 1")
    lines = plan_commands(args)
    for _, command, minutes in lines:
        print(f"{command}  # {minutes:g} core-minutes")
    print(f"{len(lines)} commands, about {sum(minutes for *_, minutes in lines) / 60:.1f} core-hours", file=sys.stderr)


# ============================================================================================================= main
COMMANDS = {Prediction: evaluate_agent, Control: evaluate_agent, Scores: collect_scores, Shaping: evaluate_shaping,
            Skills: evaluate_skills, Figures: draw_figures, Plan: print_plan, Film: draw_film}

if __name__ == "__main__":
    try:
        command = tyro.cli(Prediction | Control | Scores | Shaping | Skills | Figures | Plan | Film)
        COMMANDS[type(command)](command)
    except (UsageError, gridworld.MazeError, antmaze.MazeError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        sys.exit(2)

"""Evaluations of the learned representations (Erraqabi et al., UAI 2022): result rows, tables and figures.

    python evaluate.py prediction --run runs/tatc/umaze/s0/seed0        # linear critic on phi; rows to results/gridworld_prediction.csv
    python evaluate.py control --run runs/tatc/umaze/s0/seed0           # actor and critic on phi; rows to results/gridworld_control.csv
    python evaluate.py prediction --features exact --env umaze --dim 2  # a reference line instead of a trained run
    python evaluate.py scores --runs runs/laprep/umaze/*/seed*          # the scores logged while training; rows to results/laprep.csv
    python evaluate.py figures                                          # every figure and README table, from the rows

A result row is experiment, method, env, seed, step, metric, value. Repeating a command replaces its rows; two processes may write to
one file at the same time.

Departures from the paper, which says neither how episodes start nor what "value approximation" measures:
E1  Episodes start at s0 and, in a second training, at uniform states; figures show both. From s0 a random agent almost never meets
    a goal 53 to 79 steps away within 100 steps.
E2  Value error is the root mean square over all states but the goal, against the optimal values V* and against the exact values of
    the current policy, V^pi (both without the time limit).
E3  phi is centred and divided by one number, so that its coordinates have mean variance 1: Adam's step size then means the same for
    every representation. Distances keep their proportions, and what is linear in phi stays linear.
"""

import csv
import fcntl
import json
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional, Tuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; its threads slow small products down
import numpy as np
import scipy.stats
import torch
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

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
    "random": "#000000",
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
        lines = [",".join(COLUMNS)] + [",".join(row[name] for name in COLUMNS) for row in kept]
        write_atomically(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))


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
    if run_args.get("low_entropy_coef") == 0.1:
        name += " entropy=0.1"
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
        self.register_buffer("obs_scale", None if obs_scale is None else torch.as_tensor(obs_scale))
        self.middle = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, obs, extra=None):
        if obs.is_floating_point():
            first = (obs * self.obs_scale) @ self.weight_obs + self.bias
        else:
            first = F.embedding(obs, self.weight_obs) + self.bias
        if extra is not None:
            first = first + extra @ self.weight_extra
        return self.out(torch.tanh(self.middle(torch.tanh(first))))


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
            self.body = Net(features.shape[1], 0, 5, hidden, torch.ones(features.shape[1]))

    def forward(self):
        """logits [S, 4] and values [S] of every state."""
        heads = self.body(self.inputs)
        return heads[:, :4], heads[:, 4]


def goal_episodes(env, policy, start, episodes, horizon, gamma, rng):
    """Episodes of the goal task under policy [S, 4]: reward 1 on reaching the goal, which ends the episode, as does the horizon.

    Returns visits [S, 4], the summed Monte-Carlo returns [S, 4] of these visits, the sum of squared returns, and the episodes' rewards
    and discounted returns [episodes]. These sums are all that the loss needs: no network sees a state twice.
    """
    cumulative = np.cumsum(policy, axis=1)[:, :-1]  # [S, 3]
    next_state = env.next_state.copy()
    next_state[env.goal_index] = env.goal_index  # absorbing: the steps after the end are cut below
    if start == "s0":
        state = np.full(episodes, env.start_index)
    else:
        state = rng.integers(env.num_states - 1, size=episodes)
        state += state >= env.goal_index
    states, actions = np.empty((2, horizon, episodes), dtype=np.int64)
    uniform = rng.random((horizon, episodes, 1))
    for t in range(horizon):
        states[t], actions[t] = state, (uniform[t] > cumulative[state]).sum(1)
        state = next_state[states[t], actions[t]]
    alive = states != env.goal_index
    length = alive.sum(0)
    reward = (state == env.goal_index).astype(np.float64)
    returns = reward * gamma ** (length - 1.0 - np.arange(horizon)[:, None])  # [horizon, episodes]
    pairs, returns = (states * 4 + actions)[alive], returns[alive]
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
    """Copy the scores that training runs logged (the eval/ columns of metrics.csv) into result rows, and their phi.npz."""

    runs: Tuple[str, ...]
    """run directories"""
    results: str = "results/laprep.csv"
    """file to which the rows go; phi.npz goes to phi/ beside it"""
    every: int = 500
    """rows of metrics.csv are kept whose update is a multiple of this, and the last one"""


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
        for row in (row for row in metrics if int(row["update"]) % args.every == 0 or row is metrics[-1]):
            rows += [("representation", method_name(run_args), env_name, run_args["seed"], row["env_steps"], key[5:], float(value))
                     for key, value in row.items() if key.startswith("eval/") and value]
        copy = Path(args.results).parent / "phi" / f"{run_args['script']}-{env_name}-{run.parent.name}-seed{run_args['seed']}.npz"
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, lambda file: file.write((run / "phi.npz").read_bytes()))
    add_results(args.results, rows)
    print(f"{len(rows)} rows of {len(args.runs)} runs to {args.results}")


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
            for method, seeds in curves.get(env, {}).items():
                length = min(len(steps) for steps, _ in seeds.values())
                steps = next(iter(seeds.values()))[0][:length]
                mean, half = np.transpose([student_interval(point) for point in zip(*(values[:length] for _, values in seeds.values()))])
                colour = COLOURS.get(method, "0.3")
                handles[method], = ax.plot(steps, mean, "--" if method in DASHED else "-", color=colour, linewidth=1.5)
                if len(seeds) > 1:
                    ax.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
                counts.add(len(seeds))
            ax.set(title=env, xlabel=x_label, ylim=limits or (0, 1.1 * ax.dataLim.y1))
            ax.grid(alpha=0.3)
        row[0].set_ylabel(y_label)
    number = "-".join(map(str, sorted({min(counts), max(counts)})))
    figure.suptitle(f"{title}\nSeeds: {number}; shaded: 95% Student interval.", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)), fontsize=9)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def table_of(columns):
    """Markdown table of final scores, a row per method. columns: {(heading, env): {method: {seed: (steps, values)}}}."""
    methods = ranked({method for cells in columns.values() for method in cells}, list(COLOURS))
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
            values = [last[metric, seed] for seed in seeds]
            cells.append(f"{np.median(values):.3f}" + (f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else ""))
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

    def load(env, variant):
        return np.load(results_dir / "phi" / f"tatc-{env}-{variant}-seed0.npz")

    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes = figure.subplots(2, 3, height_ratios=(1, 1.25))
    for column, (name, env) in zip(axes.T, envs.items()):
        gridworld.draw_maze(column[0], env)
        column[0].set_title({"umaze": "U-Maze", "tmaze": "T-Maze", "4rooms": "4-rooms"}[name])
        gridworld.draw_phi(column[1], env, load(name, "s0")["phi"])
    figure.savefig(figures / "representations.png", dpi=90)

    stages = len(load("umaze", "s0")["stages"])
    figure = Figure(figsize=(2.1 * (stages + 1), 6.6), layout="constrained")
    for row, (name, env) in zip(figure.subplots(3, stages + 1), envs.items()):
        gridworld.draw_maze(row[0], env)
        file = load(name, "s0")
        for ax, phi, stage in zip(row[1:], file["snapshots"], file["stages"]):
            gridworld.draw_phi(ax, env, phi)
            ax.set_title(f"update {stage}", fontsize=9)
    figure.savefig(figures / "progress.png", dpi=80)

    variants = {"s0": "full", "s0-boredom0-entropy0.1": "beta' = 0, entropy coefficient 0.1", "s0-boredom0": "beta' = 0",
                "uniform-boredom0": "beta' = 0, uniform prior"}
    figure = Figure(figsize=(11, 8.4), layout="constrained")
    for row, (name, env) in zip(figure.subplots(3, 4), envs.items()):
        for ax, (variant, title) in zip(row, variants.items()):
            gridworld.draw_phi(ax, env, load(name, variant)["phi"])
            ax.set_title(f"{name}: {title}", fontsize=8)
    figure.savefig(figures / "ablation.png", dpi=80)
    print(f"figures: {figures}/representations.png, progress.png, ablation.png")

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
    }


def antmaze_tables(results_dir):
    """{name: table} of the ant simulator's speed and physics."""
    tables = {}
    rows = read_results(results_dir / "antmaze_speed.csv")
    if rows:
        cost = {}  # {(name, ants, threads): {clock: microseconds per env step}}
        for row in rows:
            clock, _, ants, threads = row["metric"].split("_")
            cost.setdefault((row["method"], int(ants[:-4]), int(threads[:-7])), {})[clock] = float(row["value"])
        lines = ["| | ants | threads | CPU µs per env step | wall µs per env step | CPU cost against antmaze.py |", "|---" * 6 + "|"]
        for (name, ants, threads), value in sorted(cost.items(), key=lambda item: (item[0][1:], item[1]["cpu"])):
            ratio = value["cpu"] / cost["antmaze.py", ants, threads]["cpu"]
            lines.append(f"| {name} | {ants} | {threads} | {value['cpu']:.1f} | {value['wall']:.1f} | {ratio:.2f}x |")
        tables["antmaze-speed"] = "\n".join(lines)
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
    panels = []
    for start in ("uniform", "s0"):
        table(f"prediction-{start}", rows, f"prediction-{start}", error_optimal="error to V*", error_policy="error to V^π")
        panels += [(curves_of(rows, f"prediction-{start}", metric), f"from {start}: error to {name}", None)
                   for metric, name in (("error_optimal", "V*"), ("error_policy", "V^π"))]
    draw_curves(results_dir / "figures" / "gridworld_prediction.png", panels, "A2C updates of 80 episodes",
                "Prediction: root mean square error of a linear critic on frozen phi.\n"
                "The paper: TATC outperforms Lap-rep (s0) and recovers the expressive power of Lap-rep (uniform).")
    rows = read_results(results_dir / "gridworld_control.csv")
    panels = []
    for start in ("uniform", "s0"):
        table(f"control-{start}", rows, f"control-{start}", reward="reward", discounted_return="discounted return")
        panels.append((curves_of(rows, f"control-{start}", "reward"), f"from {start}: episode reward", (-0.03, 1.03)))
    draw_curves(results_dir / "figures" / "gridworld_control.png", panels, "A2C updates of 80 episodes",
                "Control: an actor-critic on frozen phi.\nThe paper: TATC consistently outperforms Lap-rep (s0).")
    table("laprep", read_results(results_dir / "laprep.csv"), "representation", spearman_all="spearman_all", spearman_s0="spearman_s0",
          subspace="subspace", cosine="cosine", cosine_near="cosine_near")
    return tables


def draw_figures(args):
    """The body of `figures`."""
    results_dir = Path(args.results_dir)
    tables = tatc_figures(results_dir) | gridworld_figures(results_dir) | antmaze_tables(results_dir)
    if not tables:
        raise UsageError(f"{results_dir} holds no result files; run prediction, control or scores first")
    fill_tables(Path(args.readme), tables)


# ============================================================================================================= main
COMMANDS = {Prediction: evaluate_agent, Control: evaluate_agent, Scores: collect_scores, Figures: draw_figures}

if __name__ == "__main__":
    try:
        command = tyro.cli(Prediction | Control | Scores | Figures)
        COMMANDS[type(command)](command)
    except (UsageError, gridworld.MazeError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        sys.exit(2)

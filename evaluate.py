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
from functools import lru_cache
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
KEY = COLUMNS[:5]
NAMES = {"tatc": "TATC", "laprep": "Lap-rep", "dco": "DCO", "diayn": "DIAYN"}
RANGES = dict(
    seed=(0, 2**31), dim=(1, 10**4), updates=(1, 10**8), episodes=(1, 10**7), horizon=(1, 10**6),
    gamma=(0.001, 0.9999), entropy_coef=(0, 1e6), learning_rate=(0, 1), hidden=(1, 4096),
    log_every=(1, 10**8), every=(1, 10**8), reward_factor=(1e-9, 1e9), steps=(1, 10**9), num_envs=(1, 4096),
    warmup=(1, 10**9), update_ratio=(0, 100), batch_size=(1, 10**6), alpha=(0, 1e6), tau=(1e-9, 1),
    anneal=(0, 1), eval_every=(1, 10**9), eval_episodes=(1, 4096), batch=(1, 4096), skill_length=(1, 10**6),
    rollouts=(1, 4096), frames=(1, 10**4), size=(16, 4096), rounds=(1, 1000),
)


# ------------------------------------------------------------------------------------------------ result rows
def read_results(path):
    """The rows of a results file as dicts of strings; none if there is no file."""
    if not path.exists():
        return []
    text = gridworld.read_text(path, 10**9)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UsageError(f"{path} is not a results file ({error}); restore it") from None
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise UsageError(f"{path} is not a results file; its first line must be {','.join(COLUMNS)}")
    for number, row in enumerate(rows, 2):
        try:
            int(row["run_seed"]), int(row["seed"]), int(row["step"])
            if None in row or not math.isfinite(float(row["value"])):
                raise ValueError
        except (TypeError, ValueError):
            raise UsageError(f"{path}, line {number}: not {len(COLUMNS)} fields, or no numbers where they "
                             "belong; mend or delete the line") from None
    return rows


def add_results(path, rows):
    """Add rows (tuples in the order of COLUMNS), replacing those of one experiment, method, env and seeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = [dict(zip(COLUMNS, (*map(str, row[:-1]), format(row[-1], ".6g")))) for row in rows]

    def key(row):
        return tuple(row[name] for name in KEY)

    replaced = {key(row) for row in new}
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        kept = [row for row in read_results(path) if key(row) not in replaced]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept + new, key=key))  # a stable sort: steps stay in order within a key
        gridworld.write_atomically(path, text.getvalue().encode())


def results_path(args, name):
    """Where an evaluation's rows go: --results-dir, or beside its run; checked before hours are spent."""
    run = getattr(args, "run", None)
    beside = (Path(run) if run and Path(run).is_dir() else Path(run).parent if run
              else Path("runs/evaluations"))
    path = (Path(args.results_dir) if args.results_dir else beside) / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    read_results(path)
    gridworld.write_atomically(path.with_name(f".{path.name}.check"), b"")
    path.with_name(f".{path.name}.check").unlink()
    return path


def finished(path, last_step, *key):
    """Whether the results file has rows of key (experiment, method, env, run_seed, seed) up to last_step."""
    key = tuple(map(str, key))
    return any(tuple(row[name] for name in KEY) == key and int(row["step"]) >= last_step
               for row in read_results(path))


# ----------------------------------------------------------------------------- what a run left, by its script
SCRIPTS = {"tatc": tatc, "laprep": laprep, "dco": baselines, "diayn": baselines}


def load_facts(path):
    """The checkpoint of a run of any script, with its method's name in the rows."""
    facts = gridworld.load_checkpoint(path, tuple(SCRIPTS))
    variant = "" if facts["variant"] == "default" else f" {facts['variant']}"
    return facts | {"method": NAMES[facts["script"]] + variant, "run_seed": facts["args"]["seed"]}


def load_rows(path):
    """(facts, rows of metrics.csv) of a run directory."""
    facts = load_facts(path)
    rows = facts.get("rows")
    if not isinstance(rows, list) or not rows or not all({"update", "env_steps", "seconds"} <= set(row)
                                                         for row in rows):
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


def load_skills(path, num_envs, seed, rng):
    """(facts, env, Skills, pi_hi or None) of a run of tatc.py or baselines_dco_diayn.py."""
    facts = load_facts(path)
    if facts["script"] == "tatc":
        args, env, networks, omega = tatc.load(path, num_envs, seed)
        act = tatc.make_actor(networks["pi_low"], omega, env.action_shape, rng)
        return facts, env, Skills(len(omega), act, never_ended), networks["pi_hi"]
    if facts["script"] == "laprep":
        raise UsageError(f"{path} has no skills; give a run of tatc.py or baselines_dco_diayn.py")
    args, env, skills = baselines.load(path, num_envs, seed)
    return (facts, env, Skills(args.num_skills, lambda obs, skill: skills.act(obs, skill, rng), skills.ended),
            None)


def need_goal(env, kind, command):
    """Refuses an environment of another kind than the command is for, and one without a goal."""
    if not isinstance(env, kind):
        which = "gridworlds" if kind is gridworld.GridWorldVec else "ant mazes"
        raise UsageError(f"{command} is an evaluation on {which}, this is {env.name}")
    if env.goal_index is None:
        raise UsageError(f"{env.name} has no goal; mark one cell with G")


# ========================================================================== prediction and control: the agent
class PredictionAgent(nn.Module):
    """Actor: MLP 2x64 tanh on the one-hot state; critic: linear in phi (None: in the one-hot state)."""

    def __init__(self, env, features, hidden):
        super().__init__()
        self.features = None if features is None else torch.as_tensor(features, dtype=torch.float32)
        self.states = torch.arange(env.num_states)
        self.actor = tatc.Net(env.num_states, 0, 4, hidden)
        self.weight = nn.Parameter(torch.zeros(env.num_states if features is None else features.shape[1]))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self):
        """logits [S, 4] and values [S] of every state."""
        value = self.weight if self.features is None else self.features @ self.weight
        return self.actor(self.states), value + self.bias


class ControlAgent(nn.Module):
    """MLP 2x64 tanh on phi (None: on the one-hot state): an action head and a linear critic head."""

    def __init__(self, env, features, hidden):
        super().__init__()
        if features is None:
            self.inputs, self.body = torch.arange(env.num_states), tatc.Net(env.num_states, 0, 5, hidden)
        else:
            self.inputs = torch.as_tensor(features, dtype=torch.float32)
            self.body = tatc.Net(features.shape[1], 0, 5, hidden, np.ones(features.shape[1], np.float32))

    def forward(self):
        """logits [S, 4] and values [S] of every state."""
        heads = self.body(self.inputs)
        return heads[:, :4], heads[:, 4]


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
    the episodes' rewards and discounted returns, and where they ended. The sums are all that the loss needs:
    no network sees a state twice.
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
    return visits, summed, np.square(returns).sum(), reward, reward * gamma ** (length - 1.0), state


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


def root_mean_square(error):
    return float(np.sqrt(np.mean(np.square(error))))


def least_squares_fit(features, values):
    """The best linear fit of values [n] on [features, 1], features [n, d]: R^2 and root mean square error."""
    inputs = np.column_stack([features, np.ones(len(values))])
    error = values - inputs @ np.linalg.lstsq(inputs, values, rcond=None)[0]
    return {"fit_r2": 1 - error.var() / values.var(), "fit_error": root_mean_square(error)}


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
    starts: tuple[Literal["uniform", "s0", "prior"], ...] = ("uniform", "s0", "prior")
    """where episodes start; one training for each (E1)"""
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
    results_dir: Optional[str] = None
    """directory for the rows; default: beside the run"""


@dataclass
class Control(Prediction):
    """How well an actor-critic on frozen phi learns the goal task."""


def named(args, method, skipped=()):
    """The method's name with every argument of the evaluation that differs from its default."""
    base = type(args)(**{name: getattr(args, name) for name in ("run", *skipped)})
    variant = gridworld.variant_name(args, base)
    return method if variant == "default" else f"{method} {variant}"


def train_agent(args, env, features, start, reset_prob, make_agent):
    """A2C on the goal task; yields (update, metric, value) every log_every updates."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    agent = make_agent(env, features, args.hidden)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    others = np.arange(env.num_states) != env.goal_index
    optimal = env.optimal_values(args.gamma)
    rewards, discounted, last = [], [], np.full(args.episodes, env.start_index)
    for number in tqdm(range(1, args.updates + 1), desc=f"from {start}", unit="update", dynamic_ncols=True,
                       leave=False):
        logits, value = agent()
        policy = F.softmax(logits.detach().double(), dim=-1).numpy()
        state = start_states(env, start, last, reset_prob, rng)
        *sums, reward, discounted_return, last = goal_episodes(
            env, policy, state, args.horizon, args.gamma, rng)
        rewards.append(reward.mean())
        discounted.append(discounted_return.mean())
        if number % args.log_every == 0 or number == args.updates:
            estimate = value.detach().double().numpy()
            yield number, "reward", np.mean(rewards)
            yield number, "discounted_return", np.mean(discounted)
            yield number, "error_optimal", root_mean_square((estimate - optimal)[others])
            yield number, "error_policy", root_mean_square(
                (estimate - env.policy_values(policy, args.gamma))[others])
            rewards, discounted = [], []
        visits, returns = (torch.as_tensor(array, dtype=torch.float32) for array in sums[:2])
        loss = goal_task_loss(logits, value, visits, returns, float(sums[2]), args.entropy_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate_agent(args):
    """The body of `prediction` and `control`."""
    experiment, make_agent = (("control", ControlAgent) if isinstance(args, Control)
                              else ("prediction", PredictionAgent))
    if (args.run is None) == (args.features is None):
        raise UsageError("give either --run RUN_DIR or --features")
    if not args.starts:
        raise UsageError("--starts is empty; give uniform, s0 or prior")
    run_seed, env_name = args.seed, args.env
    if args.run is not None:
        facts, env, phi = load_phi(args.run)
        need_goal(env, gridworld.GridWorldVec, experiment)
        method, run_seed, env_name, features = (facts["method"], facts["run_seed"], facts["args"]["env"],
                                                phi(env.truth_obs))
    else:
        env = antmaze.make_env(args.env, 1, 0)
        need_goal(env, gridworld.GridWorldVec, experiment)
        if args.dim > env.num_states:
            raise UsageError(f"--dim is {args.dim}; use at most {env.num_states}, "
                             f"the number of states of {args.env}")
        method = "one-hot" if args.features == "onehot" else "exact eigenvectors"
        features = None if args.features == "onehot" else env.laplacian_eigenvectors(args.dim)[1]
    method, path = (named(args, method, ("features", "env", "starts")),
                    results_path(args, f"gridworld_{experiment}"))
    reset_prob = tatc.DEFAULTS.get(env_name, tatc.DEFAULTS["indices"])["reset_prob"]
    print(f"{experiment} of {method} on {env.name}, run {run_seed}, seed {args.seed}, rows to {path}")
    keys = {start: (f"{experiment}-{start}", method, env.name, run_seed, args.seed) for start in args.starts}
    if args.resume and all(finished(path, args.updates, *key) for key in keys.values()):
        return print("finished already")
    rows = []
    if experiment == "prediction":
        others = np.arange(env.num_states) != env.goal_index
        table = np.eye(env.num_states) if features is None else features
        fit = least_squares_fit(table[others], env.optimal_values(args.gamma)[others])
        rows += [("fit", method, env.name, run_seed, args.seed, 0, metric, value)
                 for metric, value in fit.items()]
    features = None if features is None else standardise(features)
    for start, key in keys.items():
        logged = list(train_agent(args, env, features, start, reset_prob, make_agent))
        rows += [(*key, *entry) for entry in logged]
        print(f"from {start}: " + ", ".join(f"{metric} {value:.3f}" for _, metric, value in logged[-4:]))
    add_results(path, rows)


# ======================================================================== scores of trained runs and policies
@dataclass
class Scores:
    """Scores that runs logged while training, and on the ants of what their policies can do, as rows."""

    runs: tuple[str, ...]
    """run directories"""
    every: int = 500
    """logged rows are kept whose update is a multiple of this, and the last one"""
    results_dir: Optional[str] = None
    """directory for the rows, phi.npz and a small checkpoint; default: rows beside each run, no copies"""


def policy_scores(path, recent, tries=64, steps=1000):
    """What trained policies of tatc.py on an ant maze can do without a task -> {metric: value}.

    travel: share of 1x1 cells from which, in a state of the ants of the last updates (`recent`), some skill
    ends 3 units away or more after c steps; used: number of skills that do so somewhere; distance: mean over
    the cells of how far the best skill gets; reaches_end, fallen, furthest: share of `tries` of pi_hi from s0
    that come within 4 units of the far end, share on their back after `steps`, and mean of the furthest
    distance from s0.
    """
    rng = np.random.default_rng(0)
    args, env, networks, omega = tatc.load(path)
    states = torch.cat([obs.flatten(0, 1) for obs, _ in recent]).numpy()
    states = rng.permutation(states[~antmaze.on_back(states)])
    own = states[np.unique(env.cell(states), return_index=True)[1]]

    def policy(obs, skill):
        return tatc.skill_policy(networks["pi_low"], omega, env.action_shape, obs, skill)

    traces = env.skill_traces(policy, len(omega), own, args.skill_length)
    distance = np.linalg.norm(traces[:, :, -1] - traces[:, :, 0], axis=-1)  # [n, cells]
    _, runner, skills, pi_hi = load_skills(path, tries, 0, rng)
    far_end = env.truth_xy[env.distance[env.start_index].argmax()]
    reached, furthest = np.zeros(tries, dtype=bool), np.zeros(tries)

    def choose(t, ants, obs, allowed):
        return tatc.choose_skills(pi_hi, obs, rng)

    for obs in run_skills(runner, skills, choose, steps, args.skill_length):
        reached |= np.linalg.norm(obs[:, :2] - far_end, axis=-1) <= 4.0
        furthest = np.maximum(furthest, env.geodesic(obs[:, :2], np.zeros(2)))
    return {"travel": (distance.max(0) >= 3).mean(), "used": (distance.max(1) >= 3).sum(),
            "distance": distance.max(0).mean(), "reaches_end": reached.mean(),
            "fallen": runner.fallen().mean(), "furthest": furthest.mean()}


def collect_scores(args):
    """The body of `scores`; the step of a row is the number of environment steps."""
    if not args.runs:
        raise UsageError("--runs is empty; give run directories")
    for run in map(Path, args.runs):
        facts, logged = load_rows(run)
        script, env_name = facts["script"], facts["env_name"]
        ant = facts["args"]["env"] in antmaze.MAZES or facts["args"]["env"].startswith("ant:")
        key = "training", facts["method"], env_name, facts["run_seed"], 0
        rows = []
        for row in (row for row in logged if row["update"] % args.every == 0 or row is logged[-1]):
            names = [name for name in row if name.startswith("eval/")
                     or name in ("rollout/reached", "rollout/skill_reward")]
            rows += [(*key, row["env_steps"], name.split("/")[1], row[name]) for name in names]
        last = logged[-1]
        rows += [(*key, last["env_steps"], name, last[name]) for name in ("update", "seconds")]
        if ant and script == "tatc":
            print(f"{run}: scores of its policies (a minute)", flush=True)
            rows += [(*key, last["env_steps"], *entry)
                     for entry in policy_scores(run, facts["recent"]).items()]
        name = f"{'antmaze' if ant else 'gridworld'}_training"
        add_results((Path(args.results_dir) if args.results_dir else run) / f"{name}.csv", rows)
        if args.results_dir:
            name = f"{script}-{env_name}-{facts['variant']}-seed{facts['run_seed']}"
            small = {key: facts[key] for key in ("script", "variant", "env_name", "args", "update",
                                                 "networks", "duals", "threshold") if key in facts}
            buffer = io.BytesIO()
            torch.save(small, buffer)
            for folder, ending, content in (
                    ("phi", "npz", (run / "phi.npz").read_bytes() if (run / "phi.npz").exists() else None),
                    ("checkpoints", "pt", buffer.getvalue() if ant else None)):
                if content is not None:
                    (Path(args.results_dir) / folder).mkdir(parents=True, exist_ok=True)
                    gridworld.write_atomically(Path(args.results_dir) / folder / f"{name}.{ending}", content)
        print(f"{run}: {len(rows)} rows")


@dataclass
class Curves:
    """Draw the metrics of several trainings: a colour per variant, a line per seed, the mean thick."""

    runs: tuple[str, ...]
    """run directories"""
    path: str = "curves.png"
    """where the picture goes"""


def draw_curves(args):
    """The body of `curves`."""
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
    hidden: int = 256
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
    goal = antmaze.RESET_POSE.astype(np.float32)[None].copy()
    goal[0, :2] = env.goal_xy
    if kind == "fiedler":
        values = env.laplacian_eigenvectors(2)[1][:, 1:].astype(np.float32)

        def phi(obs):  # of the nearest positional state
            return values[((obs[:, None, :2] - env.truth_xy) ** 2).sum(-1).argmin(1)]

    phi_goal = None if phi is None else phi(goal)

    def dense(obs):
        return -np.linalg.norm(phi(obs) - phi_goal, axis=1)

    def sparse(obs):
        return within_goal(obs, env)

    plain = {"dense": dense, "fiedler": dense, "sparse": sparse,
             "mix": lambda obs: 0.5 * dense(obs) + 0.5 * sparse(obs),
             "xy": lambda obs: -np.linalg.norm(obs[:, :2] - env.goal_xy, axis=1)}[kind]
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
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = args.learning_rate * (min(1.0, left / args.anneal)
                                                                    if args.anneal else 1.0)
        due = int(args.update_ratio * (self.moves * args.num_envs - args.warmup)) - self.updates
        if due > 0:
            obs, actions, next_obs, progress, terminated = self.replay.sample(
                (due, args.batch_size), self.rng)
            for batch in zip(obs * self.obs_scale, actions, next_obs * self.obs_scale, progress[..., 0],
                             terminated[..., 0]):
                sac_update(args, self.networks, self.optimizers, batch)
            self.updates += due

    def state(self):
        return {"networks": self.networks.state_dict(), "moves": self.moves, "updates": self.updates,
                "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
                "rng": self.rng.bit_generator.state, "torch_rng": torch.get_rng_state(),
                "replay": torch.as_tensor(self.replay.rows[: self.replay.filled]),
                "position": self.replay.position, "env": gridworld.as_tensors(self.env.get_state())}

    def load(self, state):
        self.networks.load_state_dict(state["networks"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.moves, self.updates = state["moves"], state["updates"]
        self.rng.bit_generator.state = state["rng"]
        torch.set_rng_state(state["torch_rng"])
        self.env.set_state(state["env"])
        self.replay.load(state["replay"].numpy(), state["position"])


def judge_policy(env, act, reward, horizon, seed):
    """One episode of each ant of env from s0 with actions act(obs) -> {metric: mean}."""
    env.reset(seed=seed)
    reached, total = np.zeros(env.num_envs, bool), np.zeros(env.num_envs)
    for _ in range(horizon):
        obs = env.move(act(env.obs))
        reached |= within_goal(obs, env)
        total += reward(obs)
    return {"success": reached.mean(), "success_at_end": within_goal(env.obs, env).mean(),
            "return": total.mean(), "distance": env.geodesic(env.obs[:, :2], env.goal_xy).mean(),
            "fallen": env.fallen().mean()}


def evaluate_shaping(args):
    """The body of `shaping`."""
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages: slower
    needs_phi = args.reward in ("dense", "mix")
    if needs_phi != (args.run is not None):
        how = "needs --run" if needs_phi else "uses no representation; drop --run"
        raise UsageError(f"--reward {args.reward} {how}")
    phi, method, run_seed = None, args.reward, args.seed
    if needs_phi:
        facts, env, phi = load_phi(args.run, args.num_envs, args.seed)
        method, run_seed = facts["method"], facts["run_seed"]
    else:
        env = antmaze.make_env(args.env, args.num_envs, args.seed)
    need_goal(env, antmaze.AntMazeVec, "shaping")
    reward = make_reward(args.reward, env, phi)
    method, path = named(args, method, ("reward", "env")), results_path(args, "antmaze_shaping")
    key = f"shaping-{args.reward}", method, env.name, run_seed, args.seed
    print(f"shaping with {args.reward} of {method} on {env.name}, run {run_seed}, seed {args.seed}, "
          f"rows to {path}")
    if args.resume and finished(path, args.steps, *key):
        return print("finished already")
    variant = f"{args.reward}-{method.replace(' ', '-')}-run{run_seed}"
    with gridworld.run_directory(
            args, env, variant, "shaping", ("run", "results_dir")) as (run_dir, checkpoint), \
            gridworld.stop_requests() as stop:
        agent, judge = Sac(args, env, reward), antmaze.make_env(
            facts["args"]["env"] if needs_phi else args.env, args.eval_episodes, 0)
        logged = []
        if checkpoint is not None:
            gridworld.load_state(run_dir, lambda: agent.load(checkpoint))
            logged = [tuple(entry) for entry in checkpoint["logged"]]
        moves, every = -(-args.steps // args.num_envs), max(1, args.eval_every // args.num_envs)
        bar = tqdm(initial=agent.moves * args.num_envs, total=moves * args.num_envs, unit="step",
                   unit_scale=True, dynamic_ncols=True)
        while agent.moves < moves:
            agent.step()
            bar.update(args.num_envs)
            evaluated = agent.moves % every == 0 or agent.moves == moves
            if evaluated:
                scores = judge_policy(judge, agent.act, reward, args.horizon, args.seed + agent.moves)
                if not all(map(math.isfinite, scores.values())):
                    raise UsageError(f"after {agent.moves * args.num_envs} steps a score is not finite; "
                                     "try other step sizes")
                logged += [(agent.moves * args.num_envs, metric, float(value))
                           for metric, value in scores.items()]
                bar.set_postfix({name: format(scores[name], ".2f") for name in ("success", "distance")})
                add_results(path, [(*key, *entry) for entry in logged])
            halt = bool(stop)  # read once: what was saved is what is left
            if halt or (evaluated and (agent.moves == moves or agent.moves // every % 8 == 0)):
                gridworld.save_checkpoint(run_dir, "shaping", variant, env, args, agent.state() | {
                    "update": agent.moves, "logged": [list(entry) for entry in logged]})
            if halt:
                raise KeyboardInterrupt
        bar.close()
    print(", ".join(f"{metric} {value:.3f}" for step, metric, value in logged if step == logged[-1][0]))


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


def covered_cells(env, skills, args, passed_on, repeats, rng):
    """Mean share of the maze's cells that `rollouts` randomly chosen skills visit, over `repeats`.

    passed_on: a skill starts where the last one ended, the first one at s0; otherwise each starts at s0. env
    has an ant for every repeat, or for every skill of every repeat.
    """
    chain = args.rollouts if passed_on else 1
    group = np.repeat(np.arange(repeats), env.num_envs // repeats)
    visited = np.zeros((repeats, env.num_cells), bool)
    visited[group, env.cell(env.obs)] = True
    choose = lambda t, ants, obs, allowed: random_choice(allowed, rng)  # noqa: E731
    for obs in run_skills(env, skills, choose, chain * args.skill_length, args.skill_length):
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


def evaluate_skills(args):
    """The body of `skills`."""
    if (args.run is None) != (args.floor in ("actions", "skills")):
        raise UsageError("give --run RUN_DIR, alone or with --floor choices, "
                         "or --floor actions or skills without it")
    torch.manual_seed(args.seed)
    rng, repeats = np.random.default_rng(args.seed), 8

    def prepare(num_envs):
        """(method, run_seed, env, skills) with this many ants."""
        if args.run is not None:
            facts, env, skills, _ = load_skills(args.run, num_envs, args.seed, rng)
            return facts["method"], facts["run_seed"], env, skills
        env = antmaze.make_env(args.env, num_envs, args.seed)
        need_goal(env, antmaze.AntMazeVec, "skills")
        heads, values = env.action_shape
        if args.floor == "actions":
            act = lambda obs, skill: rng.integers(values, size=(len(obs), heads))  # noqa: E731
        else:
            omega = tatc.make_directions(tatc.Args())
            act = tatc.make_actor(tatc.Net(29, 2, heads * values, 128, env.obs_scale), omega,
                                  env.action_shape, rng)
        return f"random {args.floor}", args.seed, env, Skills(8, act, never_ended)

    method, run_seed, env, skills = prepare(args.batch)
    need_goal(env, antmaze.AntMazeVec, "skills")
    method = named(args, "random choices of " + method if args.floor == "choices" else method,
                   ("floor", "env"))
    path = results_path(args, "antmaze_skills")
    key = method, env.name, run_seed, args.seed
    print(f"skills of {method} on {env.name}, run {run_seed}, seed {args.seed}, rows to {path}")
    if args.resume and finished(path, args.episodes, "skills", *key):
        return print("finished already")
    rows = []
    for name, ants in (("cells", repeats * args.rollouts), ("cells_passed_on", repeats)):
        *_, many, many_skills = prepare(ants)
        value = covered_cells(many, many_skills, args, name == "cells_passed_on", repeats, rng)
        rows.append(("skills-cells", *key, 0, name, value))
    policy = tatc.Net(29, 0, skills.count, args.hidden, env.obs_scale)
    critic = tatc.Net(29, 1, 1, args.hidden, env.obs_scale)
    optimizer = torch.optim.RMSprop([*policy.parameters(), *critic.parameters()], lr=args.learning_rate,
                                    foreach=True)
    success, returns, updates = [], [], -(-args.episodes // args.batch)
    bar = tqdm(range(1, updates + 1), unit="update", dynamic_ncols=True)
    for number in bar:
        choices, rewards = high_level_episodes(
            args, env, skills, None if args.floor == "choices" else policy, rng)
        obs, allowed, choice, time_left, to_go = choices
        success.append(rewards.any(0).mean())
        returns.append(rewards.sum(0).mean())
        if number % args.log_every == 0 or number == updates:
            step = number * args.batch
            rows += [("skills", *key, step, "success", np.mean(success)),
                     ("skills", *key, step, "return", np.mean(returns))]
            bar.set_postfix(success=f"{np.mean(success):.2f}")
            success, returns = [], []
        loss = choice_loss(policy(obs), allowed, choice, critic(obs, time_left).squeeze(-1), to_go,
                           args.entropy_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    add_results(path, rows)
    print(", ".join(f"{row[-2]} {row[-1]:.3f}" for row in [*rows[:2], *rows[-2:]])
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
    frames: int = 100
    """pictures of the animation"""
    size: int = 240
    """its height and width in pixels"""


def draw_film(args):
    """The body of `film`."""
    path, rng = gridworld.picture_path(args.path, (".gif",)), np.random.default_rng(args.seed)
    facts, env, skills, pi_hi = load_skills(args.run, 64, args.seed, rng)
    if pi_hi is None or not isinstance(env, antmaze.AntMazeVec):
        raise UsageError(f"{args.run} is not a run of tatc.py on an ant maze")
    choose = lambda t, ants, obs, allowed: tatc.choose_skills(pi_hi, obs, rng)  # noqa: E731
    states = np.stack([  # [T + 1, N, 29]
        env.obs, *run_skills(env, skills, choose, args.steps, facts["args"]["skill_length"])])
    distance = np.linalg.norm(  # [T + 1, N]
        states[..., :2] - env.truth_xy[env.distance[env.start_index].argmax()], axis=-1)
    arrived = (distance <= 4).any(0)
    ant = np.where(arrived, (distance <= 4).argmax(0), args.steps + distance.min(0)).argmin()
    last = (distance[:, ant] <= 4).argmax() if arrived[ant] else args.steps
    camera = antmaze.AntMazeVec(facts["args"]["env"].removeprefix("ant:"), 1, 0, render_mode="rgb_array")
    pictures = []
    for t in np.linspace(0, last, args.frames).astype(int):
        camera.place(np.ones(1, bool), states[t, ant][None])
        picture = Image.fromarray(camera.render()[0]).resize((args.size, args.size), Image.Resampling.LANCZOS)
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

    rounds: int = 5
    """measurements of each, in turn"""
    results_dir: Optional[str] = None
    """directory for the rows; default runs/evaluations"""


def measure_loop(rounds, updates=10):
    """Steps per CPU second of tatc.py's loop on AntMaze-1, and of mujoco.batch with the same torques from the
    same states, [(name, value)] per round."""
    args = tatc.Args(env="antmaze1")
    env, _ = tatc.prepare(args)
    networks, omega, rng = tatc.make_networks(args, env), tatc.make_directions(args), np.random.default_rng(0)
    optimizers, recent = tatc.make_optimizers(args, networks), deque(maxlen=args.phi_memory)
    bare, states = antmaze.bare_loop(env.model, args.num_envs, 1, 0)
    found, skills = [], args.episode_length // args.skill_length
    for _ in range(rounds + 1):  # the first one warms up, and fills phi's memory
        spent = dict.fromkeys(("tatc.py, whole loop", "mujoco.batch, same steps"), 0.0)
        for number in range(updates):
            begin = time.process_time()
            if number % skills == 0:
                walks = tatc.start_episodes(args, env, rng)
            batch = obs, actions, skill, _ = tatc.rollout(args, env, networks, omega, walks, rng)
            recent.append((obs[0, :, :: args.pair_gap], torch.as_tensor(walks)))
            ends = number % skills == skills - 1  # as often as an episode does; its length is no matter here
            episode = (obs[0, :, :1], obs[0, :, -1], skill.T) if ends else None
            tatc.update(args, networks, optimizers, omega, batch, episode, recent, rng)
            spent["tatc.py, whole loop"] += time.process_time() - begin
            states[:], torques = obs[0, :, 0], actions[0].numpy().swapaxes(0, 1) / 2 - 1
            begin = time.process_time()
            for torque in torques:
                bare(torque)
            spent["mujoco.batch, same steps"] += time.process_time() - begin
        found += [(name, updates * args.skill_length * args.num_envs / cost) for name, cost in spent.items()]
    return found[2:]


def measure_sac(rounds, moves=16):
    """Steps per CPU second of this file's SAC and of its peers on the same batched ants, [(name, value)]."""
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
        except ImportError:
            print(f"{name}: not installed, skipped")
        else:
            contenders[name] = lambda peer=peer: peer.learn(moves * args.num_envs, reset_num_timesteps=False)
    found = []
    for _ in range(rounds):
        for name, run in contenders.items():
            begin = time.process_time()
            run()
            found.append((name, moves * args.num_envs / (time.process_time() - begin)))
    return found


def make_peer(package, args):
    """Another package's SAC on batched ants, after its warm-up."""
    SAC = __import__(package).SAC
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv

    class Ants(VecEnv):
        """AntMazeVec behind Stable-Baselines3's interface, without the goal: only speed is measured."""

        def __init__(self):
            self.ants = antmaze.AntMazeVec("antmaze1", args.num_envs, 0)
            super().__init__(args.num_envs, self.ants.single_observation_space, self.ants.single_action_space)

        def reset(self):
            return self.ants.reset()[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            obs = self.ants.move(self.actions)
            return (obs, -np.linalg.norm(obs[:, :2], axis=1), np.zeros(self.num_envs, bool),
                    [{}] * self.num_envs)

        def get_attr(self, name, indices=None):
            return [None] * self.num_envs

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * self.num_envs

        close = set_attr = env_method = lambda self, *rest, **named: None

    peer = SAC("MlpPolicy", Ants(), learning_rate=args.learning_rate, buffer_size=args.steps,
               learning_starts=args.warmup, batch_size=args.batch_size, tau=args.tau, gamma=args.gamma,
               train_freq=1, ent_coef=args.alpha, seed=0,
               gradient_steps=int(args.update_ratio * args.num_envs),
               policy_kwargs={"net_arch": [args.hidden] * 2})
    peer.learn(args.warmup + 2 * args.num_envs)
    return peer


def evaluate_speed(args):
    """The body of `speed`: ratios within each round, on one core."""
    path, rows = results_path(args, "speed"), []
    for name, cost in antmaze.benchmark("antmaze1", 0).items():
        rows.append(("speed-simulator", name, "antmaze1", 0, 0, 0, "cpu_microseconds", cost))
        print(f"{name}: {cost:.1f} microseconds of CPU per step of an ant")
    for experiment, measure in (("loop", measure_loop), ("sac", measure_sac)):
        found, seen = measure(args.rounds), {}
        for name, value in found:
            seen.setdefault(name, []).append(value)
            rows.append((f"speed-{experiment}", name, "antmaze1", 0, 0, len(seen[name]),
                         "steps_per_cpu_second", value))
        first, *others = seen
        for other in others:
            ratios = np.array(seen[first]) / seen[other]
            print(f"{first} / {other}: {np.median(ratios):.2f} [{ratios.min():.2f}, {ratios.max():.2f}]")
    add_results(path, rows)


# ====================================================== experiments: one list behind plan, tables and figures
GRIDS, ANTS, SEEDS = tuple(gridworld.MAZES), ("antmaze1", "antmaze2"), tuple(range(10, 15))
Entry = namedtuple("Entry", "experiment label command envs seeds minutes")
ALLO = "laprep.py --prior uniform --objective allo --reachability --dim 10 --data offline"
TRAININGS = (
    Entry("gridworld", "TATC", "tatc.py", GRIDS, SEEDS, 4),
    *(Entry("ablation", f"TATC, {name}", f"tatc.py {flags}", envs, SEEDS, 4) for name, flags, envs in (
        ("beta' = 0", "--boredom-coef 0", GRIDS),
        ("entropy 0.1", "--low-entropy-coef 0.1", ("tmaze", "4rooms")),
        ("entropy 0.1, beta' = 0", "--low-entropy-coef 0.1 --boredom-coef 0", ("tmaze", "4rooms")),
        ("entropy 1", "--low-entropy-coef 1", ("umaze",)),
        ("beta' = 0, uniform prior", "--boredom-coef 0 --prior uniform", GRIDS),
        ("one skill per update", "--skills-per-update 1", GRIDS))),
    *(Entry("readings", f"TATC, {reading}, beta' = {coef}",
            f"tatc.py --updates 4000 --boredom {reading} --boredom-coef {coef}", ("umaze",), SEEDS[:3], 2)
      for reading, coefs in (("sum", ("0.002", "0.01", "0.05", "0.2", "2")),
                             ("mean", ("0.02", "0.1", "0.5", "2")))
      for coef in coefs),
    *(Entry("laprep", f"Lap-rep (s0), d = {dim}", "laprep.py" + (f" --dim {dim}" if dim != 2 else ""),
            GRIDS, SEEDS, 1.8)
      for dim in (2, 3, 5, 10)),
    *(Entry("laprep", f"Lap-rep (s0), d = {dim}, beta = {beta}", f"laprep.py --dim {dim} --beta {beta}",
            GRIDS, SEEDS[:3], 1.8)
      for dim in (2, 3) for beta in ("1", "2.5")),
    Entry("laprep", "Lap-rep (uniform), d = 2", "laprep.py --prior uniform", GRIDS, SEEDS, 1.8),
    Entry("laprep", "RA-LapRep (uniform), d = 10", f"{ALLO} --samples 200000 --updates 10000",
          GRIDS, SEEDS, 2.5),
    Entry("antmaze", "TATC", "tatc.py", (*ANTS, "antmaze-large"), SEEDS, 36),
    Entry("ants-ablation", "TATC, beta' = 0", "tatc.py --boredom-coef 0", ("antmaze1",), SEEDS[:3], 36),
    Entry("ants-ablation", "TATC, vanilla A2C",
          "tatc.py --policy-update a2c --skills-per-update 5 --updates 2500", ("antmaze1",), SEEDS[:3], 75),
    Entry("ants-laprep", "Lap-rep (uniform), d = 2", "laprep.py --prior uniform", ANTS, SEEDS, 3),
    Entry("ants-laprep", "Lap-rep (s0), d = 2", "laprep.py", ANTS, SEEDS, 3),
    Entry("ants-laprep", "RA-LapRep (uniform), d = 10", ALLO, ANTS, SEEDS, 6),
    Entry("skills", "DCO", "baselines_dco_diayn.py dco", ("antmaze1",), SEEDS[:3], 50),
    Entry("skills", "DIAYN", "baselines_dco_diayn.py diayn", ("antmaze1",), SEEDS[:3], 40),
)
# The label of an evaluation is that of the training whose run it takes, or one of NO_RUN.
NO_RUN = {"exact eigenvectors": "--features exact", "one-hot": "--features onehot", "sparse": "", "xy": "",
          "fiedler": "", "random actions": "", "random skills": ""}
LAPREPS = ("Lap-rep (s0), d = 2", "Lap-rep (s0), d = 3", "Lap-rep (uniform), d = 2")
EVALUATIONS = (
    *(Entry(name, label, f"evaluate.py {name}", GRIDS, SEEDS, 0.8) for name in ("prediction", "control")
      for label in ("TATC", *LAPREPS, "exact eigenvectors", "one-hot")),
    *(Entry("shaping", label, f"evaluate.py shaping --reward {reward}", ANTS, SEEDS[:3], 26)
      for label in ("TATC", "Lap-rep (uniform), d = 2", "RA-LapRep (uniform), d = 10", "Lap-rep (s0), d = 2")
      for reward in ("dense", "mix")),
    *(Entry("shaping", label, f"evaluate.py shaping --reward {label}", ANTS, SEEDS[:3], 26)
      for label in ("sparse", "xy", "fiedler")),
    *(Entry("skills", label, f"evaluate.py skills {flags}".strip(), ("antmaze1",), seeds, 4)
      for label, flags, seeds in (
          ("TATC", "", SEEDS), ("random choices of TATC", "--floor choices", SEEDS), ("DCO", "", SEEDS[:3]),
          ("DIAYN", "", SEEDS[:3]), ("random actions", "--floor actions", SEEDS[:3]),
          ("random skills", "--floor skills", SEEDS[:3]))),
)
EXPERIMENTS = tuple(dict.fromkeys(entry.experiment for entry in (*TRAININGS, *EVALUATIONS)))


@lru_cache(maxsize=None)
def run_of(command, env):
    """(script's name, variant, name of the environment) of a training command, by the script's own rule."""
    script, *words = shlex.split(command)
    module = {"tatc.py": tatc, "laprep.py": laprep, "baselines_dco_diayn.py": baselines}[script]
    args = tyro.cli(module.Args, args=[*words, "--env", env])
    built, variant = module.prepare(args)
    return words[0] if module is baselines else script.removesuffix(".py"), variant, built.name


def method_of(command, env):
    """The method's name in the rows of a training command."""
    script, variant, _ = run_of(command, env)
    return NAMES[script] + ("" if variant == "default" else f" {variant}")


def trained(label, env):
    """The training with this label on env."""
    return next((entry for entry in TRAININGS if entry.label == label and env in entry.envs), None)


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


def plan_commands(args):
    """[(stage, command, core-minutes)] of a plan, in order, each command once."""
    minutes_of, results = {}, f"--results-dir {shlex.quote(args.results_dir)}"

    def add(stage, command, minutes):
        minutes_of.setdefault((stage, f"python {command}"), minutes)

    def train(entry, env, seed):
        """The run directory of a training, whose lines join the plan."""
        script, variant, env_name = run_of(entry.command, env)
        run = shlex.quote(f"runs/{script}/{env_name}/{variant}/seed{seed}")
        add("train", f"{entry.command} --env {env} --seed {seed} --resume", entry.minutes)
        add("score", f"evaluate.py scores {results} --runs {run}", 1 if env in antmaze.MAZES else 0.1)
        return run

    for entry in (*TRAININGS, *EVALUATIONS):
        for env, seed in itertools.product(entry.envs, entry.seeds):
            if entry.experiment not in args.experiment:
                continue
            if entry in TRAININGS:
                train(entry, env, seed)
            elif entry.label in NO_RUN:
                source = f"{NO_RUN[entry.label]} --env {env} --seed {seed}".strip()
                add("evaluate", f"{entry.command} {source} --resume {results}", entry.minutes)
            else:
                run = train(trained(entry.label.removeprefix("random choices of "), env), env, seed)
                for again in range(3 if entry.experiment == "skills" else 1):
                    add("evaluate", f"{entry.command} --run {run} --seed {again} --resume {results}",
                        entry.minutes)
    add("figures", f"evaluate.py figures {results}", 1)
    stages = ("train", "score", "evaluate", "figures")
    found = [(stage, command, minutes) for (stage, command), minutes in minutes_of.items()
             if args.stage in (None, stage)]
    return sorted(found, key=lambda line: stages.index(line[0]))


def print_plan(args):
    """The body of `plan`; the total goes to stderr, so that stdout is a file of commands."""
    if not args.experiment:
        raise UsageError(f"--experiment is empty; choose among {', '.join(EXPERIMENTS)}")
    lines = plan_commands(args)
    for _, command, minutes in lines:
        print(f"{command}  # {minutes:g} core-minutes")
    print(f"{len(lines)} commands, about {sum(minutes for *_, minutes in lines) / 60:.1f} core-hours",
          file=sys.stderr)


# ========================================================================================= figures and tables
@dataclass
class Figures:
    """Redraw the figures and the tables of the Markdown files from the result rows."""

    results_dir: str = "results"
    """directory of the result files; the pictures go to its subdirectory figures"""
    readme: tuple[str, ...] = ("README.md", "results/README.md")
    """files with tables, each between <!-- table:NAME --> and <!-- end -->"""


COLOURS = {"TATC": "#d62728", "Lap-rep (s0), d = 2": "#1f77b4", "Lap-rep (s0), d = 3": "#17becf",
           "Lap-rep (uniform), d = 2": "#2ca02c", "RA-LapRep (uniform), d = 10": "#98df8a",
           "exact eigenvectors": "#9467bd", "fiedler": "#9467bd", "one-hot": "#7f7f7f", "DCO": "#ff7f0e",
           "DIAYN": "#8c564b", "sparse": "#bcbd22", "xy": "#e377c2", "random actions": "#000000",
           "random skills": "#c49c94", "random choices of TATC": "#f7b6d2"}
STARTS = {"uniform": "uniform starts", "prior": "starts of the non-uniform prior", "s0": "starts at s0"}
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


def list_tables():
    """Every table: {name: (results file, share of the last steps that is averaged (0: only the last),
    {metric: heading}, [(label in the table, label of the entry, experiment of the rows, env)])}."""
    scores = {"spearman_s0": "Spearman, from s0", "spearman_all": "Spearman, all pairs",
              "coverage": "coverage", "far": "far"}
    laplacian = {"spearman_s0": "Spearman, from s0", "spearman_all": "Spearman, all pairs",
                 "subspace": "subspace", "fiedler_r2": "R² of the exact second eigenvector"}
    ants = scores | {"coverage_total": "ever visited", "travel": "cells where a skill travels",
                     "used": "skills used", "distance": "distance of the best skill",
                     "reaches_end": "reaches the far end", "fallen": "fallen", "seconds": "seconds"}
    errors = {"error_optimal": "error to V*", "error_policy": "error to V^pi"}
    rewards = {"reward": "episode reward", "discounted_return": "discounted return"}
    cells = {"cells": "cells of 48 skills from s0", "cells_passed_on": "cells, state passed on"}
    tables, envs = {}, (*GRIDS, *ANTS, "antmaze-large")
    for name, file, metrics in (
            ("gridworld", "gridworld_training", scores), ("ablation", "gridworld_training", scores),
            ("readings", "gridworld_training", {"extent": "extent of phi"} | scores),
            ("laprep", "gridworld_training", laplacian), ("antmaze", "antmaze_training", ants),
            ("ants-ablation", "antmaze_training", ants), ("ants-laprep", "antmaze_training", laplacian)):
        tables[name] = file, 0.0, metrics, [
            (entry.label, entry.label, "training", env) for env in envs for entry in TRAININGS
            if entry.experiment == name and env in entry.envs]
    for name, experiment, file, metrics in (
            ("fit", "prediction", "gridworld_prediction", {"fit_r2": "R² of V*", "fit_error": "RMSE"}),
            *((f"prediction-{start}", "prediction", "gridworld_prediction", errors) for start in STARTS),
            *((f"control-{start}", "control", "gridworld_control", rewards) for start in STARTS),
            ("skills", "skills", "antmaze_skills", {"success": "success", "return": "return"}),
            ("skills-cells", "skills", "antmaze_skills", cells)):
        tables[name] = file, 0.1, metrics, [
            (entry.label, entry.label, name, env) for env in envs for entry in EVALUATIONS
            if entry.experiment == experiment and env in entry.envs]
    shaping = {"success": "success", "success_at_end": "at the end", "distance": "distance to the goal",
               "fallen": "fallen"}
    tables["shaping"] = "antmaze_shaping", 0.1, shaping, [
        (reward if entry.label in NO_RUN else f"{entry.label}, {reward}", entry.label, f"shaping-{reward}",
         env) for env in ANTS for entry in EVALUATIONS if entry.experiment == "shaping"
        for reward in entry.command.split()[-1:]]
    return tables


def label_method(label, env):
    """The method's name in the rows for a label of the experiments on env."""
    prefix = "random choices of " if label.startswith("random choices") else ""
    entry = trained(label.removeprefix(prefix), env)
    return label if entry is None else prefix + method_of(entry.command, env)


def curves_of(rows, experiment, label, env, metric):
    """{run_seed: [(step, value)]} with the evaluation's seeds averaged."""
    found, wanted = {}, (experiment, label_method(label, env), env, metric)
    for row in rows:
        if (row["experiment"], row["method"], row["env"], row["metric"]) == wanted:
            found.setdefault(int(row["run_seed"]), {}).setdefault(
                float(row["step"]), []).append(float(row["value"]))
    return {seed: [(step, np.mean(values)) for step, values in sorted(steps.items())]
            for seed, steps in sorted(found.items())}


def final_value(curve, tail):
    """The mean over the last share `tail` of the steps; 0 takes the last value."""
    last = curve[-1][0]
    return np.mean([value for step, value in curve if step > (1 - tail) * last or step == last])


def interval(values, form):
    """Mean and 95 % bootstrap interval."""
    low, high = scipy.stats.bootstrap((values,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    return f"{np.mean(values):{form}} [{low:{form}}, {high:{form}}]"


def score_table(rows, tail, metrics, entries):
    """Markdown: a row per entry, a column per metric; every seed where there are fewer than six."""
    lines = ["| | seeds | " + " | ".join(metrics.values()) + " |", "|---" * (len(metrics) + 2) + "|"]
    for shown, label, experiment, env in entries:
        curves = [curves_of(rows, experiment, label, env, metric).values() for metric in metrics]
        scores = [[final_value(curve, tail) for curve in seeds] for seeds in curves]
        cells = [" ".join(f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}" for value in values)
                 if len(values) < 6 else interval(values, ".3f") for values in scores]
        if any(scores):
            count = max(map(len, scores))
            lines.append(f"| {gridworld.TITLES[env]}: {shown} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else None


def difference_table(rows, experiment, metric, envs, labels, tail):
    """Markdown table of TATC minus each label, over seeds (paired), with the 95 % bootstrap interval."""
    lines = ["| TATC minus | " + " | ".join(gridworld.TITLES[env] for env in envs) + " |",
             "|---" * (len(envs) + 1) + "|"]
    for label in labels:
        cells = []
        for env in envs:
            ours, theirs = ({seed: final_value(curve, tail) for seed, curve in curves_of(
                rows, experiment, name, env, metric).items()} for name in ("TATC", label))
            gap = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
            cells.append(interval(gap, "+.3f") if len(gap) > 2 else "")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_tables(rows):
    """{name: Markdown table} of every experiment that has rows."""
    tables = {name: score_table(rows[file], tail, metrics, entries)
              for name, (file, tail, metrics, entries) in list_tables().items()}
    for name, experiment, metric in (("differences", "prediction-uniform", "error_optimal"),
                                     ("differences-control", "control-uniform", "reward")):
        file = f"gridworld_{experiment.split('-')[0]}"
        tables[name] = difference_table(rows[file], experiment, metric, GRIDS, LAPREPS, 0.1)
    return {name: table for name, table in tables.items() if table}


def draw_comparison(path, title, x_label, panels, rows):
    """Curves over trained seeds: a row per (table, metric, y axis) of panels, a column per environment."""
    tables, grid = list_tables(), []
    for name, metric, y_label in panels:
        file, _, _, entries = tables[name]
        row = {}
        for shown, label, experiment, env in entries:
            seeds = curves_of(rows[file], experiment, label, env, metric)
            if seeds:
                row.setdefault(env, []).append((shown, COLOURS.get(label, "0.3"), seeds))
        if row:
            grid.append((y_label, row))
    if not grid:
        return
    columns = max(len(row) for _, row in grid)
    figure, handles = Figure(figsize=(max(8, 4.2 * columns), 2.8 * len(grid) + 1.2), layout="constrained"), {}
    for axes, (y_label, row) in zip(figure.subplots(len(grid), columns, squeeze=False), grid):
        for ax in axes[len(row):]:
            ax.axis("off")
        for ax, (env, curves) in zip(axes, row.items()):
            for shown, colour, seeds in curves:
                style = dict(color=colour, ls="--" if shown.endswith("mix") else "-")
                for curve in seeds.values():
                    ax.plot(*zip(*curve), lw=0.6, alpha=0.5, **style)
                length = min(map(len, seeds.values()))
                mean = np.mean([curve[:length] for curve in seeds.values()], axis=0)
                handles[shown], = ax.plot(*mean.T, lw=1.8, **style)
            ax.set_title(gridworld.TITLES[env], fontsize=10)
            ax.set_xlabel(x_label, fontsize=8)
            ax.grid(alpha=0.3)
        axes[0].set_ylabel(y_label)
    figure.suptitle(f"{title}\nThin: trained seeds; thick: their mean.", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)),
                  fontsize=8)
    figure.savefig(path, dpi=100)
    print(f"figure: {path}")


def committed_phi(results_dir, label, env):
    """The arrays of the first committed seed of a training on env's present maze, or None."""
    entry = trained(label, env.name)
    if entry is None:
        return None
    script, variant, env_name = run_of(entry.command, env.name)
    for path in sorted((results_dir / "phi").glob(f"{script}-{env_name}-{variant}-seed*.npz")):
        try:
            with np.load(path) as file:
                arrays = dict(file)
            if np.array_equal(arrays["xy"], env.truth_xy):
                return arrays
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise UsageError(f"{path} is damaged; restore it") from None
    return None


def draw_phi_rows(path, rows):
    """A grid of pictures; rows of (env, [(title, phi [S, d])]), the maze first."""
    rows = [row for row in rows if row[1]]
    if not rows:
        return
    columns = 1 + max(len(entries) for _, entries in rows)
    figure = Figure(figsize=(2.3 * columns, 2.4 * len(rows)), layout="constrained")
    for axes, (env, entries) in zip(figure.subplots(len(rows), columns, squeeze=False), rows):
        gridworld.draw_truth(axes[0], env)
        for ax in axes[1 + len(entries):]:
            ax.axis("off")
        for ax, (title, phi) in zip(axes[1:], entries):
            gridworld.draw_phi(ax, env, phi, title)
    figure.savefig(path, dpi=90)
    print(f"figure: {path}")


def phi_figures(results_dir):
    """phi of every maze, its progress, and the ablations, from the committed npz files."""
    envs = [antmaze.make_env(name, 1, 0) for name in (*GRIDS, *ANTS, "antmaze-large")]
    figures, ours = results_dir / "figures", [(env, committed_phi(results_dir, "TATC", env)) for env in envs]
    ours = [(env, arrays) for env, arrays in ours if arrays is not None]
    if ours:
        figure = Figure(figsize=(2.2 * len(ours), 4.6), layout="constrained")
        for column, (env, arrays) in zip(figure.subplots(2, len(ours), squeeze=False).T, ours):
            gridworld.draw_truth(column[0], env)
            gridworld.draw_phi(column[1], env, arrays["phi"], "phi")
        figure.savefig(figures / "representations.png", dpi=90)
    draw_phi_rows(figures / "progress.png", [
        (env, [(f"update {stage}", phi) for stage, phi in zip(arrays["stages"], arrays["snapshots"])])
        for env, arrays in ours])
    labels = ("TATC", *(entry.label for entry in TRAININGS if entry.experiment == "ablation"))
    rows = []
    for env in envs[:len(GRIDS)]:
        found = [(label.removeprefix("TATC, "), committed_phi(results_dir, label, env)) for label in labels]
        rows.append((env, [(title, arrays["phi"]) for title, arrays in found if arrays is not None]))
    draw_phi_rows(figures / "ablation.png", rows)


def fill_tables(path, tables):
    """Put each table between its markers; a marker without its end, or of an unknown table, is refused."""
    text = gridworld.read_text(path)
    for name in re.findall(r"<!-- table:([\w-]+) -->", text):
        if not re.search(rf"<!-- table:{name} -->\n(?:(?!<!-- table:).)*?<!-- end -->", text, re.DOTALL):
            raise UsageError(f"{path}: <!-- table:{name} --> has no <!-- end --> before the next table; "
                             "add it")
        table = tables.get(name, "(no rows yet)")
        text = re.sub(rf"(<!-- table:{name} -->\n).*?(<!-- end -->)",
                      lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)
    gridworld.write_atomically(path, text.encode())


def draw_figures(args):
    """The body of `figures`."""
    results_dir = Path(args.results_dir)
    files = ("gridworld_training", "antmaze_training", "gridworld_prediction", "gridworld_control",
             "antmaze_shaping", "antmaze_skills")
    rows = {name: read_results(results_dir / f"{name}.csv") for name in files}
    if not any(rows.values()):
        raise UsageError(f"{results_dir} holds no result files; run another subcommand first")
    tables = make_tables(rows)
    for path in map(Path, args.readme):
        if path.exists():
            fill_tables(path, tables)
    print(f"{len(tables)} tables")
    (results_dir / "figures").mkdir(exist_ok=True)
    phi_figures(results_dir)
    for name, comparison in COMPARISONS.items():
        draw_comparison(results_dir / "figures" / f"{name}.png", *comparison, rows)


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

"""Lap-rep: the Laplacian representation (Wu et al., ICLR 2019), TATC's baseline (Erraqabi et al., UAI 2022, Eq. 1).

    python laprep.py --env umaze --prior uniform

Learns phi from random walks alone, started uniformly or, as TATC has to, around s0. Writes args.json, metrics.csv,
checkpoint.pt, phi.npz, representation.png and progress.png to the run directory.

The estimator. Let L = I - P be the Laplacian of the walk (u, v) ~ data, and all means be over the data's states. Graph drawing asks
for d functions of least total variation that are orthonormal:

    minimise  E ||phi(u) - phi(v)||^2 = 2 sum_i <phi_i, L phi_i>   subject to   E[phi phi^T] = I,

solved by the d smallest eigenvectors of L. Eq. 1 replaces the constraint by a penalty, up to the constant beta d:

    beta ||E[phi phi^T] - I||_F^2 = beta E_{x, y}[(phi(x)^T phi(y))^2 - ||phi(x)||^2 - ||phi(y)||^2] + beta d.

Every eigenvector then keeps the variance max(0, 1 - lambda / beta), and any rotation of phi is as good. With n independent states,
rows of X, the mean over pairs x != y is (||X^T X||_F^2 - sum_k ||X_k||^4) / (n (n - 1)): unbiased, and n d^2 work instead of n^2 d.

Conventions. The first eigenvector is constant and it is one of the d: d = 2 is one informative direction, d = 3 two. Wu's code asks
for E[phi phi^T] = I / d with beta 5; scaling phi by sqrt(d) gives Eq. 1 with beta 5 / d. The default here is what that was at Wu's own
d = 20, 0.25: with 2.5 at d = 2 the penalty's noise hides the difference between eigenvectors (19x19 maze, 12000 updates: largest
principal angle's cosine 0.83). v follows u by 1 + geometric(0.9) steps within the episode, which changes eigenvalues but not
eigenvectors. The states x are the batch's u: they are independent draws from the same distribution, and a sum of means needs no
independence between its terms.

What the paper leaves open: the online data is a window of the newest --samples steps, to which N episodes are added every
--updates-per-rollout updates (on the gridworlds about as many environment steps as TATC's). Episodes have TATC's K steps in the
s0 prior and Wu's 50 in the uniform prior. --objective generalized (Wang et al., ICML 2021) and allo (Gomez et al., ICLR 2024) find
the eigenvectors themselves, in order, instead of some rotation of them.
"""

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Optional

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; its threads slow small products down
import numpy as np
import scipy.stats
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from tqdm import tqdm

import antmaze
import gridworld

# TATC's values per domain; "grid" and "ant" are for mazes of your own.
PAPER = {
    "umaze": dict(reset_prob=0.3, episode_length=90),
    "tmaze": dict(reset_prob=0.2, episode_length=40),
    "4rooms": dict(reset_prob=0.25, episode_length=60),
    "grid": dict(reset_prob=0.25),
    "ant": dict(reset_prob=0.2, episode_length=500),
}
GRID = dict(data="online", updates_per_rollout=4)
ANT = dict(data="offline", updates_per_rollout=100)


@dataclass
class Args:
    env: str = "umaze"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, a maze text file, or ant:FILE for a text maze with the ant"""
    seed: int = 0
    """seed of everything: network, data, environment"""
    run_dir: Optional[str] = None
    """where to write; default runs/laprep/<env>/<variant>/seed<seed>"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    updates: int = 30000
    """number of updates"""
    prior: Literal["s0", "uniform"] = "s0"
    """s0: an episode starts where the last one ended, or at s0 with probability p_r; uniform: at a uniform free state"""
    objective: Literal["graph_drawing", "generalized", "allo"] = "graph_drawing"
    """graph_drawing: Eq. 1; generalized: its sum over the first 1..d coordinates; allo: augmented Lagrangian"""
    dim: int = 2
    """d, dimension of phi, the constant eigenvector included"""
    beta: Optional[float] = None
    """beta, weight of the orthonormality penalty, Eq. 1; default 0.25 = 5 / 20, and 1 for allo"""
    dual_learning_rate: float = 1e-3
    """step size of allo's dual variables"""
    discount: float = 0.9
    """v follows u by 1 + geometric(discount) steps; 0 takes single transitions"""
    batch_size: Optional[int] = None
    """n, pairs (u, v) per update; default 128, and 1024 for allo"""
    data: Optional[Literal["online", "offline"]] = None
    """online: a window that moves while training; offline: collected once before it; default offline on the ants"""
    samples: Optional[int] = None
    """environment steps held as data; default 30000, and 500000 for offline data of the ants"""
    updates_per_rollout: Optional[int] = None
    """updates between two rollouts of online data; default 4, and 100 on the ants"""
    reset_prob: Optional[float] = None
    """p_r, probability that an episode of the s0 prior starts at s0"""
    episode_length: Optional[int] = None
    """K, steps per episode; default TATC's in the s0 prior, 50 in the uniform prior"""
    num_envs: int = 32
    """N, episodes collected side by side"""
    hidden: int = 256
    """units in each of the three hidden layers"""
    learning_rate: float = 1e-3
    """Adam step size"""
    num_threads: int = 1
    """threads of the ant simulator; results do not depend on it"""
    log_every: int = 1000
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 5000
    """updates between two checkpoints"""
    device: str = "cpu"
    """torch device of the network"""


# ---------------------------------------------------------------------------------------------------------- network
class Phi(nn.Module):
    """MLP with three hidden ReLU layers: float obs [..., obs_size], scaled by fixed constants, or state indices [...] -> [..., d]."""

    def __init__(self, obs_size, dim, hidden, obs_scale=None):
        super().__init__()
        bound = obs_size**-0.5  # torch's own default for a linear layer
        self.weight_obs = nn.Parameter(torch.empty(obs_size, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))
        self.register_buffer("obs_scale", None if obs_scale is None else torch.tensor(obs_scale))
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, obs):
        if obs.is_floating_point():
            first = (obs * self.obs_scale) @ self.weight_obs + self.bias
        else:
            first = F.embedding(obs, self.weight_obs) + self.bias
        return self.out(F.relu(self.third(F.relu(self.second(F.relu(first))))))


def make_env(args):
    """The environment of --env; its module has the drawing functions."""
    if args.env in antmaze.MAZES or args.env.startswith("ant:"):
        return antmaze.make(args.env.removeprefix("ant:"), args.num_envs, args.seed, num_threads=args.num_threads), antmaze
    return gridworld.make(args.env, args.num_envs, args.seed), gridworld


# ----------------------------------------------------------------------------------------------------------- losses
def graph_drawing_loss(phi_u, phi_v, beta, weights):
    """Eq. 1, with phi_u, phi_v [n, d] of n independent pairs; weights [d], all 1.

    weights d, d-1, ..., 1 give the generalized objective, the sum of Eq. 1 over the first k coordinates for k = 1..d: coordinate i
    is in d + 1 - i of these sums, the pair i, j in the smaller of their two numbers.
    """
    count = len(phi_u)
    attract = ((phi_u - phi_v).square() * weights).sum() / count
    square = phi_u.square()
    off_diagonal = ((phi_u.T @ phi_u).square() - square.T @ square) / (count * (count - 1))  # E[phi_i phi_j]^2, [d, d]
    repel = (off_diagonal * torch.minimum(weights[:, None], weights)).sum() - 2 * (square * weights).sum() / count
    return attract + beta * repel, {"attract": attract.detach(), "repel": repel.detach()}


def augmented_lagrangian_loss(phi_u, phi_v, duals, beta):
    """ALLO: the max over duals [d, d] of the min over phi of

        E ||phi(u) - phi(v)||^2 + sum_{j >= k} (duals_jk e_jk + beta e_jk^2),  e_jk = E[phi_j stop_gradient(phi_k)] - 1{j = k}.

    The stopped gradient lets coordinate j give way to those before it only, which orders them; at the solution duals_ii = -4 lambda_i.
    e^2 is the product of two estimates from independent halves of phi_u [n, d]. Returns also e [d, d], the duals' ascent direction.
    beta stays as it is: growing with the error, as the authors let it, it drowns the eigenvalues' differences in noise (19x19 maze, 8000
    updates, d = 11: mean cosine 0.36 with growth, 0.99 without).
    """
    attract = (phi_u - phi_v).square().sum() / len(phi_u)
    identity = torch.eye(phi_u.shape[1], device=phi_u.device)
    first, second = (torch.tril(phi.T @ phi.detach() / len(phi) - identity) for phi in phi_u.chunk(2))
    error, square = (first + second) / 2, (first * second).sum()
    loss = attract + (duals * error).sum() + beta * square
    return loss, {"attract": attract.detach(), "error": square.detach()}, error.detach()


# ------------------------------------------------------------------------------------------------------------- data
def rollout(args, env, rng):
    """N random walks of K steps [N, K + 1, ...]; in the s0 prior each goes on where it was, or from s0 with probability p_r."""
    if args.prior == "uniform":
        env.place(np.ones(args.num_envs, dtype=bool), "uniform")
    else:
        env.place(rng.random(args.num_envs) < args.reset_prob, "s0")
    heads, values = env.action_shape
    actions = rng.integers(values, size=(args.episode_length, args.num_envs, heads))
    obs = [env.obs] + [env.move(action) for action in actions]
    return np.stack(obs, axis=1)


def sample_pairs(data, count, discount, rng):
    """(u, v), each [count, ...], from episodes data [E, K + 1, ...]: v follows u by 1 + geometric steps, cut at the episode's end."""
    episode, first = rng.integers(len(data), size=count), rng.integers(data.shape[1] - 1, size=count)
    left = data.shape[1] - 1 - first  # the gap is at most this
    gap = np.ones(count, dtype=np.int64)
    if discount > 0:
        gap += (np.log1p(-rng.random(count) * (1 - discount**left)) / np.log(discount)).astype(np.int64)
    return data[episode, first], data[episode, first + np.minimum(gap, left)]


# ----------------------------------------------------------------------------------------------------------- update
def update(args, phi, optimizer, duals, data, rng):
    """One step of phi, and for allo of the dual variables, on args.batch_size pairs."""
    pairs = torch.as_tensor(np.stack(sample_pairs(data, args.batch_size, args.discount, rng)), device=args.device)
    if pairs.is_floating_point():
        phi_u, phi_v = phi(pairs)
    else:  # a state that was drawn many times goes through the network once
        states, inverse = torch.unique(pairs, return_inverse=True)
        phi_u, phi_v = F.embedding(inverse, phi(states))
    if args.objective == "allo":
        loss, info, error = augmented_lagrangian_loss(phi_u, phi_v, duals, args.beta)
    else:
        weights = torch.ones(args.dim, device=args.device)
        if args.objective == "generalized":
            weights = weights.cumsum(0).flip(0)
        loss, info = graph_drawing_loss(phi_u, phi_v, args.beta, weights)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.objective == "allo":
        duals += args.dual_learning_rate * error
    return {f"loss/{key}": value for key, value in info.items()}


# ------------------------------------------------------------------------------------------------------- evaluation
def rank_correlation(phi, env):
    """Spearman correlation of ||phi(s) - phi(s')|| with the true distance, over all pairs and from s0; phi [S, d]."""
    upper = np.triu_indices(len(phi), 1)
    distance = np.linalg.norm(phi[upper[0]] - phi[upper[1]], axis=-1)
    from_start = np.linalg.norm(phi - phi[env.start_index], axis=-1)
    return {
        "eval/spearman_all": scipy.stats.spearmanr(distance, env.distance[upper]).statistic,
        "eval/spearman_s0": scipy.stats.spearmanr(from_start, env.distance[env.start_index]).statistic,
        "eval/extent": distance.max(),
    }


def eigenvector_scores(phi, eigenvalues, eigenvectors):
    """How well phi [S, d] matches the first d exact eigenvectors; [m] and [S, m], m >= d, are the smallest, in order.

    cosine: mean over i of the cosine of phi_i with the eigenspace of the i-th eigenvalue, for the ordered objectives.
    cosine_near: the same with neighbouring eigenvalues that differ by less than 5% as one: an exact solver on 200,000 samples of
    4-rooms, where five eigenvalues do, cannot tell their eigenvectors apart.
    subspace: cosine of the largest principal angle between the spans, for Eq. 1, which any rotation solves. If an eigenspace is cut
    by d, phi must contain all eigenspaces before it and lie in those up to it.
    """
    dim = phi.shape[1]
    unit = phi / np.maximum(np.linalg.norm(phi, axis=0), 1e-12)
    scores = {}
    for name, tolerance in (("cosine_near", 0.05), ("cosine", 1e-6)):
        gaps = np.diff(eigenvalues) > tolerance * np.maximum(eigenvalues[1:], 1e-9)
        space = np.append(0, np.cumsum(gaps))  # of each eigenvector
        inside = (eigenvectors.T @ unit) ** 2 * (space[:, None] == space[:dim])  # [m, d]
        scores[f"eval/{name}"] = np.sqrt(inside.sum(0)).mean()
    basis = np.linalg.qr(phi)[0]
    cut = dim < len(space) and space[dim] == space[dim - 1]
    needed = eigenvectors[:, space < space[dim - 1]] if cut else eigenvectors[:, :dim]
    allowed = eigenvectors[:, space <= space[dim - 1]]
    cosines = [np.linalg.svd(basis.T @ vectors, compute_uv=False).min() for vectors in (needed, allowed) if vectors.size]
    return scores | {"eval/subspace": min(cosines)}


@torch.no_grad()
def representation(args, phi, env):
    """phi [S, d] of the ground-truth states."""
    return phi(torch.as_tensor(env.truth_obs, device=args.device)).cpu().numpy()


# ----------------------------------------------------------------------------------------------- arguments and files
class UsageError(Exception):
    """Something the user asked for that cannot be done; the message names the cause and the fix."""


def resolve(args):
    """The environment, and the arguments with the paper's values for it in place of None."""
    at_least = dict(updates=1, dim=1, num_envs=1, num_threads=1, hidden=1, log_every=1, checkpoint_every=1)
    at_least |= dict(batch_size=4, samples=1, updates_per_rollout=1, episode_length=1)
    for name, least in at_least.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least {least}")
    env, world = make_env(args)
    defaults = PAPER["ant"] | ANT if world is antmaze else PAPER.get(args.env, PAPER["grid"]) | GRID
    defaults |= dict(batch_size=1024, beta=1.0) if args.objective == "allo" else dict(batch_size=128, beta=0.25)
    if args.prior == "uniform":
        defaults["episode_length"] = 50
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.episode_length is None:
        args.episode_length = int(np.ceil(env.cell_distance.max() / 20)) * 20
    if args.samples is None:
        args.samples = 500_000 if world is antmaze and args.data == "offline" else 30_000
    if world is gridworld and args.dim > env.num_states:
        raise UsageError(f"--dim is {args.dim}; {args.env} has {env.num_states} states and no more eigenvectors")
    if not 0 <= args.reset_prob <= 1:
        raise UsageError(f"--reset-prob is {args.reset_prob}; use a probability")
    if not 0 <= args.discount < 1:
        raise UsageError(f"--discount is {args.discount}; use a number from 0 to below 1")
    for name in ("beta", "learning_rate", "dual_learning_rate"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a non-negative number")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {args.device!r} is not usable here; try cpu") from None
    if args.run_dir is None:
        variant = f"{args.prior}-d{args.dim}"
        if args.objective != "graph_drawing":
            variant += f"-{args.objective}"
        if args.data != defaults["data"]:
            variant += f"-{args.data}"
        args.run_dir = f"runs/laprep/{Path(args.env.replace(':', '-')).stem}/{variant}/seed{args.seed}"
    return env, world


def write_atomically(path, write):
    """Write to a temporary file, flush it to disk, rename: a kill leaves the old file or the new one, never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def as_tensors(tree):
    """Numpy arrays in a tree of dicts as tensors, so that a checkpoint loads with weights_only=True."""
    if isinstance(tree, dict):
        return {key: as_tensors(value) for key, value in tree.items()}
    return torch.as_tensor(tree) if isinstance(tree, np.ndarray) else tree


def load_checkpoint(path):
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise UsageError(f"{path} is damaged or not a checkpoint ({type(error).__name__}); delete it to start again") from None


def write_args(args, run_dir):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    content = json.dumps(asdict(args) | {"script": Path(__file__).stem, "versions": versions, "commit": commit}, indent=2)
    write_atomically(run_dir / "args.json", lambda file: file.write(content.encode()))


def read_rows(path, last_update):
    """The rows of metrics.csv up to `last_update`: what was logged after the checkpoint is made again."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["update"]) <= last_update]


def write_rows(path, rows):
    """metrics.csv anew; a quantity that did not occur between two log points is left empty there."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [",".join(columns)] + [",".join(row.get(key, "") for key in columns) for row in rows]
    write_atomically(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))


# --------------------------------------------------------------------------------------------------------- training
def train(args):
    torch.set_num_threads(1)  # networks this small run slower on more threads
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages, which run 2x slower
    env, world = resolve(args)
    run_dir = Path(args.run_dir)
    checkpoint_path, metrics_path = run_dir / "checkpoint.pt", run_dir / "metrics.csv"
    if not args.resume and (run_dir / "args.json").exists():
        raise UsageError(f"{run_dir} holds a run already; add --resume to continue it or choose another --run-dir")

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    phi = Phi(env.obs_size, args.dim, args.hidden, env.phi_scale).to(args.device)
    optimizer = torch.optim.Adam(phi.parameters(), lr=args.learning_rate, fused=True)
    duals = torch.zeros(args.dim, args.dim, device=args.device)
    exact = env.laplacian_eigenvectors(min(args.dim + 8, env.num_states)) if world is gridworld else None
    far_cells = env.cell_distance >= np.quantile(env.cell_distance, 0.8)
    episodes = -(-args.samples // args.episode_length)  # held as data, rounded up

    done, seconds, env_steps, sums, rows, snapshots = 0, 0.0, 0, {}, [], {}
    data, visits = None, np.zeros(env.num_cells, dtype=np.int64)

    def collect():
        nonlocal data, env_steps
        walks = rollout(args, env, rng)
        visits[:] += np.bincount(env.cell(walks[:, 1:].reshape((-1,) + walks.shape[2:])), minlength=env.num_cells)
        data = (walks if data is None else np.concatenate([data, walks]))[-episodes:]
        env_steps += args.num_envs * args.episode_length

    identity = {key: value for key, value in asdict(args).items() if key not in ("updates", "run_dir", "resume", "device", "num_threads")}
    checkpoint = load_checkpoint(checkpoint_path) if args.resume and checkpoint_path.exists() else None
    if checkpoint is not None:
        other = [f"{key} {old!r} there, {identity.get(key)!r} here"
                 for key, old in checkpoint.get("args", {"env": "unknown"}).items() if identity.get(key) != old]
        if other:
            raise UsageError(f"{checkpoint_path} is of another run ({'; '.join(other)}); use its arguments or another --run-dir")
    run_dir.mkdir(parents=True, exist_ok=True)
    write_args(args, run_dir)
    print(f"writing to {run_dir}" + (f", continuing after update {checkpoint['update']}" if checkpoint else ""))
    if args.data == "offline":  # made again from the seed on --resume: it would be most of the checkpoint
        for _ in tqdm(range(-(-episodes // args.num_envs)), desc="data", unit="rollout", dynamic_ncols=True):
            collect()
    if checkpoint is not None:
        done, seconds, sums = checkpoint["update"], checkpoint["seconds"], checkpoint["sums"]
        phi.load_state_dict(checkpoint["phi"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        duals.copy_(checkpoint["duals"])
        env.set_state(checkpoint["env"])
        rng.bit_generator.state = checkpoint["rng"]
        snapshots = {update: array.numpy() for update, array in checkpoint["snapshots"].items()}
        visits, env_steps = checkpoint["visits"].numpy(), checkpoint["env_steps"]
        data = checkpoint["data"].numpy() if args.data == "online" else data
        rows = read_rows(metrics_path, done)

    stages = {max(1, round(share * args.updates)) for share in (0.03, 0.08, 0.15, 0.3, 0.6, 1.0)}
    begin = time.perf_counter() - seconds
    bar = tqdm(range(done + 1, args.updates + 1), initial=done, total=args.updates, unit="update", dynamic_ncols=True)
    for number in bar:
        if args.data == "online" and (number - 1) % args.updates_per_rollout == 0:
            collect()
        info = update(args, phi, optimizer, duals, data, rng)
        for key, value in info.items():
            total, count = sums.get(key, (0.0, 0))
            sums[key] = (total + float(value), count + 1)
        if number in stages:
            snapshots[number] = representation(args, phi, env)
        if number % args.log_every == 0 or number == args.updates:
            array = representation(args, phi, env)
            row = {"update": number, "env_steps": env_steps, "seconds": time.perf_counter() - begin}
            row |= {key: total / count for key, (total, count) in sorted(sums.items())} | rank_correlation(array, env)
            row |= {} if exact is None else eigenvector_scores(array, *exact)
            row |= {"eval/coverage": (visits > 0).mean(), "eval/far": visits[far_cells].sum() / visits.sum(),
                    "rollout/reached": env.cell_distance[visits > 0].max()}
            rows.append({key: str(value) if isinstance(value, int) else format(value, ".6g") for key, value in row.items()})
            write_rows(metrics_path, rows)
            shown = ("spearman_all", "spearman_s0", "subspace", "cosine", "coverage")
            bar.set_postfix({key: format(row[f"eval/{key}"], ".2f") for key in shown if f"eval/{key}" in row})
            sums = {}
            if args.data == "online":
                visits[:] = 0
        if number % args.checkpoint_every == 0 or number == args.updates:
            checkpoint = {
                "script": "laprep", "args": identity, "update": number, "seconds": time.perf_counter() - begin, "sums": sums,
                "phi": phi.state_dict(), "optimizer": optimizer.state_dict(), "duals": duals, "env": as_tensors(env.get_state()),
                "rng": rng.bit_generator.state, "snapshots": as_tensors(snapshots), "visits": torch.as_tensor(visits),
                "env_steps": env_steps,
            }
            if args.data == "online":
                checkpoint["data"] = torch.as_tensor(data)
            write_atomically(checkpoint_path, lambda file: torch.save(checkpoint, file))
    return finish(args, env, world, phi, snapshots, rows, run_dir)


def finish(args, env, world, phi, snapshots, rows, run_dir):
    """phi.npz, the pictures, and the last numbers."""
    array = representation(args, phi, env)
    distance = env.distance[env.start_index]
    arrays = dict(xy=env.truth_xy, phi=array, distance=distance, start=env.start_index, stages=list(snapshots), snapshots=list(snapshots.values()))
    write_atomically(run_dir / "phi.npz", lambda file: np.savez_compressed(file, **arrays))
    shown = [np.pad(phi, ((0, 0), (0, max(0, 2 - args.dim)))) for phi in [array, *snapshots.values()]]  # pictures have two axes
    world.draw_representation(run_dir / "representation.png", env, shown[0])
    world.draw_progress(run_dir / "progress.png", env, shown[1:], [f"update {update}" for update in snapshots])
    last = rows[-1]
    print(", ".join(f"{key} {last[key]}" for key in last if key.startswith("eval/") and last[key]))
    print(f"{args.updates / float(last['seconds']):,.0f} updates per second, {float(last['seconds']) / 60:.1f} minutes")
    print(f"pictures: {run_dir}/representation.png, progress.png")


if __name__ == "__main__":
    try:
        train(tyro.cli(Args))
    except (UsageError, gridworld.MazeError, antmaze.MazeError) as error:
        print(f"laprep.py: {error}", file=sys.stderr)
        sys.exit(2)

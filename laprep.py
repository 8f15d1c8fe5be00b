"""Lap-rep: the Laplacian representation (Wu et al., ICLR 2019), TATC's baseline (UAI 2022, Eq. 1).

    python laprep.py --env umaze --prior uniform

Learns phi from random walks alone, started uniformly or, as TATC has to, around s0. Writes args.json,
metrics.csv, checkpoint.pt, phi.npz, representation.png and progress.png to the run directory.

The estimator. Let L = I - P be the Laplacian of the walk (u, v) ~ data, and all means be over the data's
states. Graph drawing asks for d functions of least total variation that are orthonormal:

    minimise  E ||phi(u) - phi(v)||^2 = 2 sum_i <phi_i, L phi_i>   subject to   E[phi phi^T] = I,

solved by L's d smallest eigenvectors (exactly so if the walk keeps the data's distribution, as in the uniform
prior). Eq. 1 replaces the constraint by a penalty, up to the constant beta d:

    beta ||E[phi phi^T] - I||_F^2 = beta E_{x, y}[(phi(x)^T phi(y))^2 - ||phi(x)||^2 - ||phi(y)||^2] + beta d.

Every eigenvector then keeps the variance max(0, 1 - lambda / beta), and any rotation of phi is as good. With
n independent states, rows of X, the mean over pairs x != y is (||X^T X||_F^2 - sum_k ||X_k||^4)
/ (n (n - 1)): unbiased, and n d^2 work instead of n^2 d.

Conventions. The first eigenvector is constant and it is one of the d: d = 2 is one informative direction, d =
3 two. Wu's published code asks for E[phi phi^T] = I / d with beta 5 in its rooms and 1 in its HardMaze;
scaling phi by sqrt(d) gives Eq. 1 with beta 5 / d. The default is what that was at Wu's own d = 20, 0.25:
with 2.5 at d = 2 the penalty's noise hides the difference between eigenvectors (19x19 maze, 12000 updates:
largest principal angle's cosine 0.83). v follows u by 1 + geometric(0.9) steps within the episode, which
changes eigenvalues but not eigenvectors. The states x are the batch's u: they are independent draws from the
same distribution, and a sum of means needs no independence between its terms.

What the paper leaves open: network, optimiser and batch are Wu's (Appendix C.1's two tanh layers of 128 are
read as TATC's). The online data is a window of the newest --samples steps, to which N episodes are added
every --updates-per-rollout updates (gridworlds, s0 prior: about as many environment steps as TATC's).
Episodes have TATC's K steps, on the gridworlds in the uniform prior Wu's 50. On the ants phi sees tatc.py's
D6 scale and the data holds every 10th state of episodes of 500 steps (500,000 steps, so 50,000 states): a
randomly acting ant moves 0.1 unit in 10 steps, so that single steps of short episodes do not tell the
eigenvectors apart (R^2 of the exact second one, seed 0: 0.94 and 0.95 with Wu's episodes of 50 steps, 0.999
on both mazes with these; results/trials.csv). --objective allo (Gomez et al., ICLR 2024) finds the
eigenvectors in order, not a rotation of them; --reachability is RA-LapRep.
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Optional

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from tqdm import tqdm

import gridworld
from antmaze import make_env
from gridworld import UsageError

# TATC's values per environment; "indices" is any with state indices, "vectors" any with float vectors.
DEFAULTS = {
    "umaze": dict(reset_prob=0.3, episode_length=90),
    "tmaze": dict(reset_prob=0.2, episode_length=40),
    "4rooms": dict(reset_prob=0.25, episode_length=60),
    "indices": dict(reset_prob=0.25, pair_gap=1, data="online", samples=30_000, updates_per_rollout=4),
    "vectors": dict(reset_prob=0.2, episode_length=500, pair_gap=1, data="offline", samples=500_000,
                    updates_per_rollout=100),
    "ants": dict(pair_gap=10),
}
OBJECTIVES = {
    "graph_drawing": dict(batch_size=128, beta=0.25),
    "allo": dict(batch_size=1024, beta=1.0),
}


default = partial(gridworld.default, DEFAULTS | OBJECTIVES)


@dataclass
class Args:
    env: str = "umaze"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, antmaze-large, maze file, ant:FILE, your FILE.py:FUNCTION"""
    seed: int = 0
    """seed of everything: network, data, environment"""
    run_dir: Annotated[Optional[str], tyro.conf.arg(
        help_behavior_hint="(default: runs/laprep/<env>/<variant>/seed<seed>)")] = None
    """where to write"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    updates: int = 30_000
    """number of updates"""
    prior: Literal["s0", "uniform"] = "s0"
    """s0: episodes start where the last ended, or at s0 with probability p_r; uniform: at any free state"""
    objective: Literal["graph_drawing", "allo"] = "graph_drawing"
    """graph_drawing: Eq. 1; allo: augmented Lagrangian, the eigenvectors themselves in order"""
    reachability: bool = False
    """RA-LapRep: allo's coordinates over the square roots of their eigenvalues, without the constant one"""
    dim: int = 2
    """d, dimension of phi, the constant eigenvector included"""
    beta: Annotated[Optional[float], default("beta")] = None
    """beta, weight of the orthonormality penalty, Eq. 1; 0.25 = 5 / 20: Wu's in the rooms, at d = 20"""
    dual_learning_rate: float = 1e-3
    """step size of allo's dual variables"""
    discount: float = 0.9
    """v follows u by 1 + geometric(discount) steps of --pair-gap; 0 takes single ones"""
    pair_gap: Annotated[Optional[int], default("pair_gap")] = None
    """environment steps between two states of the data"""
    batch_size: Annotated[Optional[int], default("batch_size")] = None
    """n, pairs (u, v) per update"""
    data: Annotated[Optional[Literal["online", "offline"]], default("data")] = None
    """online: a window that moves while training; offline: collected once before it"""
    samples: Annotated[Optional[int], default("samples")] = None
    """environment steps held as data"""
    updates_per_rollout: Annotated[Optional[int], default("updates_per_rollout")] = None
    """updates between two rollouts of online data"""
    reset_prob: Annotated[Optional[float], default("reset_prob")] = None
    """p_r, probability that an episode of the s0 prior starts at s0"""
    episode_length: Annotated[Optional[int], default("episode_length")] = None
    """K, steps per episode; on the gridworlds 50, as Wu et al., in the uniform prior"""
    num_envs: int = 32
    """N, episodes collected side by side"""
    hidden: int = 256
    """units in each of the three hidden layers"""
    learning_rate: float = 1e-3
    """Adam step size"""
    log_every: int = 1000
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 5000
    """updates between two checkpoints"""
    tensorboard: bool = False
    """also write the rows of metrics.csv as TensorBoard events (needs tensorboard)"""


RANGES = dict(
    seed=(0, 2**31), updates=(1, 10**8), dim=(1, 256), beta=(0, 1e6), dual_learning_rate=(0, 1),
    discount=(0, 0.9999), pair_gap=(1, 1000), batch_size=(4, 10**6), samples=(1, 2 * 10**7),
    updates_per_rollout=(1, 10**8), reset_prob=(0, 1), episode_length=(1, 10**5), num_envs=(1, 4096),
    hidden=(1, 4096), learning_rate=(0, 1), log_every=(1, 10**8), checkpoint_every=(1, 10**8),
)


def resolve(args, env):
    """The values for this environment and objective in place of None."""
    kind = "indices" if env.obs_scale is None else "vectors"
    values = (DEFAULTS[kind] | DEFAULTS.get(getattr(env, "defaults", None), {})
              | DEFAULTS.get(args.env, {}) | OBJECTIVES[args.objective])
    if args.prior == "uniform" and kind == "indices":
        values["episode_length"] = 50
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.episode_length is None:
        furthest = 100 if env.distance is None else env.distance[env.start_index].max()
        args.episode_length = math.ceil(furthest / 20) * 20
    if args.episode_length % args.pair_gap:
        raise UsageError(f"--pair-gap is {args.pair_gap}; "
                         f"use a divisor of --episode-length {args.episode_length}")
    if args.dim > len(env.truth_obs):
        raise UsageError(f"--dim is {args.dim}; {args.env} has {len(env.truth_obs)} states to judge it by")
    if args.reachability and (args.objective != "allo" or args.dim < 2):
        raise UsageError("--reachability needs eigenvalues; add --objective allo and --dim 2 or more")


def prepare(args):
    """Builds the environment, fills in the arguments' defaults and names the run: (env, variant)."""
    gridworld.check_ranges(args, RANGES)
    env = make_env(args.env, args.num_envs, args.seed)
    resolve(args, env)
    base = Args(env=args.env, objective=args.objective, prior=args.prior)
    resolve(base, env)
    base.objective, base.prior = Args.objective, Args.prior
    return env, gridworld.variant_name(args, base)


# ---------------------------------------------------------------------------------------------------- network
class Phi(nn.Module):
    """MLP with three hidden ReLU layers: float obs [..., obs_size], scaled by fixed constants, or state
    indices [...] -> [..., d]."""

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
        if self.obs_scale is None:
            first = F.embedding(obs, self.weight_obs) + self.bias
        else:
            first = F.linear(obs * self.obs_scale, self.weight_obs.T, self.bias)
        return self.out(F.relu(self.third(F.relu(self.second(F.relu(first))))))


# ----------------------------------------------------------------------------------------------------- losses
def graph_drawing_loss(phi_u, phi_v, beta):
    """Eq. 1, with phi_u, phi_v [n, d] of n independent pairs (u, v)."""
    count = len(phi_u)
    attract = (phi_u - phi_v).square().sum(-1).mean()
    norm = phi_u.square().sum(-1)  # ||phi(x)||^2, [n]
    product = (  # mean of (phi(x)^T phi(y))^2 over the pairs x != y
        ((phi_u.T @ phi_u).square().sum() - norm.square().sum()) / (count * (count - 1)))
    repel = product - 2 * norm.mean()
    return attract + beta * repel, {"attract": attract.detach(), "repel": repel.detach()}


def augmented_lagrangian_loss(phi_u, phi_v, duals, beta):
    """ALLO: the max over duals [d, d] of the min over phi of

        E ||phi(u) - phi(v)||^2 + sum_{j >= k} (duals_jk e_jk + beta e_jk^2),
        e_jk = E[phi_j stop_gradient(phi_k)] - 1{j = k}.

    The stopped gradient lets coordinate j give way to those before it only, which orders them; at the
    solution duals_ii = -4 lambda_i. e^2 is the product of two estimates from independent halves of phi_u
    [n, d]. Returns also e [d, d], the duals' ascent direction. beta stays as it is: growing with the error,
    as the authors let it, it drowns the eigenvalues' differences in noise (19x19 maze, 8000 updates, d = 11:
    mean cosine 0.36 with growth, 0.99 without).
    """
    attract = (phi_u - phi_v).square().sum() / len(phi_u)
    identity = torch.eye(phi_u.shape[1])
    first, second = (torch.tril(phi.T @ phi.detach() / len(phi) - identity) for phi in phi_u.chunk(2))
    error, square = (first + second) / 2, (first * second).sum()
    loss = attract + (duals * error).sum() + beta * square
    return loss, {"attract": attract.detach(), "error": square.detach()}, error.detach()


# ------------------------------------------------------------------------------------------------------- data
def rollout(args, env, rng):
    """N random walks of K steps, every pair_gap-th state [N, K / pair_gap + 1, ...], and all states' cells.

    In the s0 prior each goes on where it was, or from s0 with probability p_r or if it has fallen.
    """
    if args.prior == "uniform":
        env.place(np.ones(args.num_envs, dtype=bool), "uniform")
    else:
        env.place((rng.random(args.num_envs) < args.reset_prob) | env.fallen(), "s0")  # as TATC (D7)
    heads, values = env.action_shape
    actions = rng.integers(values, size=(args.episode_length, args.num_envs, heads))
    obs = [env.obs] + [env.move(action) for action in actions]
    return np.stack(obs[:: args.pair_gap], axis=1), np.concatenate([env.cell(part) for part in obs[1:]])


def sample_pairs(data, count, discount, rng):
    """(u, v), each [count, ...], from episodes data [E, K + 1, ...]: v follows u by g steps, P(g) ~
    discount^(g - 1) up to the episode's end."""
    episode, first = rng.integers(len(data), size=count), rng.integers(data.shape[1] - 1, size=count)
    left = data.shape[1] - 1 - first  # the gap is at most this
    gap = np.ones(count, dtype=np.int64)
    if discount > 0:
        gap += (np.log1p(-rng.random(count) * (1 - discount**left)) / np.log(discount)).astype(np.int64)
    return data[episode, first], data[episode, first + np.minimum(gap, left)]


# ----------------------------------------------------------------------------------------------------- update
def update(args, phi, optimizer, duals, data, rng):
    """One step of phi, and for allo of the dual variables, on args.batch_size pairs."""
    pairs = torch.as_tensor(np.stack(sample_pairs(data, args.batch_size, args.discount, rng)))
    if phi.obs_scale is not None:
        phi_u, phi_v = phi(pairs)
    else:  # a state that was drawn many times goes through the network once
        states, inverse = torch.unique(pairs, return_inverse=True)
        phi_u, phi_v = F.embedding(inverse, phi(states))
    if args.objective == "allo":
        loss, info, error = augmented_lagrangian_loss(phi_u, phi_v, duals, args.beta)
    else:
        loss, info = graph_drawing_loss(phi_u, phi_v, args.beta)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.objective == "allo":
        duals += args.dual_learning_rate * error
    return {f"loss/{key}": value for key, value in info.items()}


# ------------------------------------------------------------------------------------------------- evaluation
def eigenvector_scores(phi, eigenvalues, eigenvectors):
    """How well phi [S, d] matches the exact eigenvectors [S, m], m >= d, of eigenvalues [m], smallest first.

    cosine: mean cosine of phi_i with the eigenspace of the i-th eigenvalue, for allo, whose phi is ordered.
    subspace: cosine of the largest principal angle between the spans, for Eq. 1, which any rotation solves.
    If an eigenspace is cut by d, phi must contain all eigenspaces before it and lie in those up to it.
    fiedler_r2: share of the second eigenvector's variance that a linear function of phi explains.
    """
    dim = phi.shape[1]
    fiedler, inputs = eigenvectors[:, 1], np.column_stack([phi, np.ones(len(phi))])
    error = fiedler - inputs @ np.linalg.lstsq(inputs, fiedler, rcond=None)[0]
    eigenvectors = np.linalg.qr(eigenvectors)[0]  # the ants' truth states are a sample of the graph's nodes
    unit = phi / np.maximum(np.linalg.norm(phi, axis=0), 1e-12)
    space = np.append(  # of each eigenvector
        0, np.cumsum(np.diff(eigenvalues) > 1e-6 * np.maximum(eigenvalues[1:], 1e-9)))
    inside = (eigenvectors.T @ unit) ** 2 * (space[:, None] == space[:dim])  # [m, d]
    basis = np.linalg.qr(phi)[0]
    cut = dim < len(space) and space[dim] == space[dim - 1]
    needed = eigenvectors[:, space < space[dim - 1]] if cut else eigenvectors[:, :dim]
    allowed = eigenvectors[:, space <= space[dim - 1]]
    cosines = [np.linalg.svd(basis.T @ vectors, compute_uv=False).min()
               for vectors in (needed, allowed) if vectors.size]
    return {"eval/cosine": np.sqrt(inside.sum(0)).mean(), "eval/subspace": min(cosines),
            "eval/fiedler_r2": 1 - error.var() / fiedler.var()}


def reachability_scale(duals):
    """What phi's coordinates are divided by [d - 1]: at ALLO's solution duals_ii = -4 lambda_i (RA-LapRep,
    Wang et al., ICML 2023)."""
    return (-duals.diagonal()[1:] / 4).clamp_min(1e-6).sqrt()


@torch.no_grad()
def representation(args, phi, duals, obs):
    """The run's representation [n, d] at obs [n, ...]; d - 1 coordinates with --reachability."""
    output = phi(torch.as_tensor(obs))
    return (output[:, 1:] / reachability_scale(duals) if args.reachability else output).numpy()


# --------------------------------------------------------------------------------------------------- training
def load(path, num_envs=1, seed=0):
    """(args, env, phi) of a run directory or checkpoint; phi takes obs [n, ...] and gives an array [n, d]."""
    checkpoint = gridworld.load_checkpoint(path, ("laprep",))

    def build():
        args, env = gridworld.rebuild(path, checkpoint, Args, lambda name: make_env(name, num_envs, seed))
        gridworld.check_ranges(args, RANGES)
        resolve(args, env)
        phi, duals = Phi(env.obs_size, args.dim, args.hidden, env.phi_scale), checkpoint["duals"]
        phi.load_state_dict(checkpoint["networks"])
        if duals.shape != (args.dim, args.dim) or not duals.isfinite().all():
            raise ValueError
        return args, env, lambda obs: representation(args, phi, duals, obs)

    return gridworld.load_state(path, build)


def train(args):
    torch.set_num_threads(1)  # networks this small run slower on more threads
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages: 2x slower
    env, variant = prepare(args)
    with gridworld.run_directory(args, env, variant, "laprep", ("updates",)) as (run_dir, checkpoint), \
            gridworld.stop_requests() as stop:
        torch.manual_seed(args.seed)
        rng = np.random.default_rng(args.seed)
        phi = Phi(env.obs_size, args.dim, args.hidden, env.phi_scale)
        optimizer = torch.optim.Adam(phi.parameters(), lr=args.learning_rate, fused=True)
        duals = torch.zeros(args.dim, args.dim)
        exact = None
        if hasattr(env, "laplacian_eigenvectors"):
            exact = env.laplacian_eigenvectors(min(args.dim + 8, len(env.truth_obs)))
        episodes = -(-args.samples // args.episode_length)  # held as data, rounded up
        data = None
        truth = partial(representation, args, phi, duals, env.truth_obs)  # phi now; duals change in place
        # What changes beside network, optimiser, environment, data and random numbers: the checkpoint's rest.
        run = {"update": 0, "seconds": 0.0, "env_steps": 0, "rows": [], "sums": {}, "snapshots": {},
               "visits": torch.zeros(env.num_cells, dtype=torch.long),
               "ever": torch.zeros(env.num_cells, dtype=torch.bool)}

        def collect():
            nonlocal data
            walks, cells = rollout(args, env, rng)
            run["visits"] += torch.as_tensor(np.bincount(cells, minlength=env.num_cells))
            run["env_steps"] += args.num_envs * args.episode_length
            data = (walks if data is None else np.concatenate([data, walks]))[-episodes:]

        def restore():
            nonlocal data
            phi.load_state_dict(checkpoint["networks"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            duals.copy_(checkpoint["duals"])
            env.set_state(checkpoint["env"])
            rng.bit_generator.state = checkpoint["rng"]
            gridworld.restore_run(run, checkpoint)
            if args.data == "online":
                data = checkpoint["data"].numpy()

        if args.data == "offline":  # made again from the seed on --resume: it would be most of the checkpoint
            for _ in tqdm(range(-(-episodes // args.num_envs)), desc="data", unit="rollout",
                          dynamic_ncols=True):
                collect()
        if checkpoint is not None:
            gridworld.load_state(run_dir, restore)
        gridworld.write_args(args, env, variant, "laprep", run_dir)

        def save():
            content = {"duals": duals, "networks": phi.state_dict(), "optimizer": optimizer.state_dict(),
                       "rng": rng.bit_generator.state, "env": gridworld.as_tensors(env.get_state())} | (
                           {"data": torch.as_tensor(data)} if args.data == "online" else {})
            gridworld.save_checkpoint(run_dir, "laprep", variant, env, args, run | content)

        stages = {max(1, round(share * args.updates)) for share in (0.03, 0.08, 0.15, 0.3, 0.6, 1.0)}
        begin = time.perf_counter() - run["seconds"]
        bar = tqdm(range(run["update"] + 1, args.updates + 1), initial=run["update"], total=args.updates,
                   unit="update", dynamic_ncols=True)
        for number in bar:
            if args.data == "online" and (number - 1) % args.updates_per_rollout == 0:
                collect()
            gridworld.add_to_sums(run["sums"], update(args, phi, optimizer, duals, data, rng), number)
            run["update"], run["seconds"] = number, time.perf_counter() - begin
            if number in stages:
                run["snapshots"][number] = torch.as_tensor(truth())
            if number % args.log_every == 0 or number == args.updates:
                row = {"update": number, "env_steps": run["env_steps"], "seconds": run["seconds"]}
                row |= gridworld.rank_correlation(truth(), env)
                if exact is not None:
                    with torch.no_grad():
                        row |= eigenvector_scores(phi(torch.as_tensor(env.truth_obs)).numpy(), *exact)
                row |= gridworld.coverage(run, env)
                gridworld.log_row(args, run, row, run_dir, bar,
                                  ("spearman_all", "spearman_s0", "subspace", "fiedler_r2"))
                if args.data == "online":
                    run["visits"][:] = 0
            gridworld.save_or_stop(number % args.checkpoint_every == 0 or number == args.updates, stop, save)
        gridworld.write_representation(run_dir, env, truth(), run, args.env)


if __name__ == "__main__":
    gridworld.guarded(lambda: train(tyro.cli(Args)))

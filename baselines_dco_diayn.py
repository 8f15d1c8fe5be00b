"""DCO and DIAYN: the skills that TATC's are compared with (UAI 2022, Section 4.2.2 and Appendix C.2.2).

    python baselines_dco_diayn.py dco --env antmaze1      # 40 to 50 minutes
    python baselines_dco_diayn.py diayn --env antmaze1    # 20 minutes

Deep covering options (Jinnai et al., ICLR 2020) with their DDPG, and "Diversity is all you need" (Eysenbach
et al., ICLR 2019) with its SAC. Both also run on the gridworlds (--env 4rooms), in minutes. Each writes
args.json, metrics.csv, checkpoint.pt, curves.png and skills.png to the run directory, DCO also phi.npz
(phi [S, options] = f). `load` gives the trained skills of either.

Sources: f as Wu et al. (ICLR 2019), DDPG as Lillicrap et al. (ICLR 2016), percentile 30 as Jinnai et al.
(Table 1), 8 skills and 500,000 transitions each as TATC's appendix, SAC's constants as Eysenbach et al.
Departures, and what the papers leave open:
B1  DDPG learns from the fixed random-walk dataset alone, as TATC's appendix says, so its exploration noise
    has no use here.
B2  The option's reward f(s) - f(s') is divided by its standard deviation over the dataset: f changes little
    in one step, and a factor leaves the best policy as it is.
B3  The sign of an eigenvector is arbitrary: each f keeps the one that its initial weights lead to.
B4  The value that DDPG learns does not stop where the option ends: only the execution does.
B5  On the gridworlds DDPG's actor is the argmax of a Q-network with four outputs (Q-learning on the same
    dataset), and SAC's expectations over the four moves are exact.
B6  SAC has two critics and no value network (Haarnoja et al. 2018b); DIAYN's authors used its first version.
B7  N agents step together, then --updates-per-step gradient steps follow (the authors: one per environment
    step). Episodes of different agents end at different times, all at s0 again: no ant stays on its back.
B8  On the ants f sees x, y at four times and the rest at a fiftieth of the policies' scale, as TATC's phi
    does (antmaze.py), and learns from every 10th state of walks of 500 steps, as Lap-rep does (laprep.py).
B9  Random walks use the ants' 5 torque values, as TATC's and Lap-rep's do; the options' and skills' own
    torques are continuous.
B10 DDPG's critic has no weight decay and sees the action in its first layer; no batch normalisation, and
    torch's own initialisation (Lillicrap et al.: 1e-2, second layer, yes, +-3e-3 in the last layer).
"""

import copy
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Optional, Union

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from tqdm import tqdm

import gridworld
from antmaze import make_env
from gridworld import UsageError

# "indices" are the gridworlds, "vectors" the ants.
DEFAULTS = {
    "dco": {
        "indices": dict(f_updates=3000, f_batch_size=1024, policy_updates=5000, batch_size=512, tau=0.01,
                        hidden=(64, 64), skill_length=100, episode_length=50, pair_gap=1),
        "vectors": dict(f_updates=30_000, f_batch_size=128, policy_updates=50_000, batch_size=64, tau=0.001,
                        hidden=(400, 300), skill_length=200, episode_length=500, pair_gap=10),
    },
    "diayn": {
        "indices": dict(updates=20_000, updates_per_step=1, hidden=(128, 128), skill_length=30,
                        episode_length=60),
        "vectors": dict(updates=47_000, updates_per_step=2, hidden=(300, 300), skill_length=200,
                        episode_length=1000),
    },
}


dco_default, diayn_default = (partial(gridworld.default, DEFAULTS[name]) for name in ("dco", "diayn"))


@dataclass
class DCO:
    """Deep covering options: each option leads down the second eigenvector of its own random walks."""

    env: str = "antmaze1"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, antmaze-large, a maze text file or ant:FILE for ants in it"""
    seed: int = 0
    """seed of everything: networks, data, environment"""
    run_dir: Annotated[Optional[str], tyro.conf.arg(
        help_behavior_hint="(default: runs/dco/<env>/<variant>/seed<seed>)")] = None
    """where to write"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    num_skills: int = 8
    """number of options"""
    samples: int = 500_000
    """random-walk transitions from uniform starts of each option"""
    episode_length: Annotated[Optional[int], dco_default("episode_length")] = None
    """steps per random walk"""
    pair_gap: Annotated[Optional[int], dco_default("pair_gap")] = None
    """environment steps between two states that f learns from"""
    f_updates: Annotated[Optional[int], dco_default("f_updates")] = None
    """updates of each f (Wu: 30000)"""
    f_batch_size: Annotated[Optional[int], dco_default("f_batch_size")] = None
    """pairs per update of f (Wu: 128)"""
    f_beta: float = 0.25
    """weight of the orthonormality penalty (Wu: 5 / d at d = 20)"""
    f_discount: float = 0.9
    """v follows u by 1 + geometric(discount) steps of --pair-gap"""
    percentile: float = 30.0
    """an option ends where f is at most this percentile of f over its data, and starts elsewhere"""
    policy_updates: Annotated[Optional[int], dco_default("policy_updates")] = None
    """DDPG updates of each option"""
    batch_size: Annotated[Optional[int], dco_default("batch_size")] = None
    """transitions per DDPG update (DDPG: 64)"""
    gamma: float = 0.99
    """discount of the options"""
    tau: Annotated[Optional[float], dco_default("tau")] = None
    """step of the target networks (DDPG: 0.001)"""
    hidden: Annotated[Optional[tuple[int, ...]], dco_default("hidden")] = None
    """units of the actor's and the critic's hidden layers (DDPG: 400 300)"""
    skill_length: Annotated[Optional[int], dco_default("skill_length")] = None
    """steps of an option in the scores and the picture"""
    num_envs: int = 32
    """N, agents side by side"""
    log_every: int = 1000
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 10_000
    """updates between two checkpoints"""
    tensorboard: bool = False
    """also write the rows of metrics.csv as TensorBoard events (needs tensorboard)"""


@dataclass
class DIAYN:
    """Diversity is all you need: skills that a discriminator can tell apart by the states they visit."""

    env: str = "antmaze1"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, antmaze-large, a maze text file or ant:FILE for ants in it"""
    seed: int = 0
    """seed of everything: networks, skills, environment"""
    run_dir: Annotated[Optional[str], tyro.conf.arg(
        help_behavior_hint="(default: runs/diayn/<env>/<variant>/seed<seed>)")] = None
    """where to write"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    num_skills: int = 8
    """number of skills z"""
    updates: Annotated[Optional[int], diayn_default("updates")] = None
    """steps of all N agents together, each followed by the gradient steps; N * updates environment steps"""
    updates_per_step: Annotated[Optional[int], diayn_default("updates_per_step")] = None
    """gradient steps after each step of all N agents"""
    discriminator: Literal["state", "xy"] = "state"
    """what the discriminator sees of an ant: all, or its position (as the authors, for ants)"""
    episode_length: Annotated[Optional[int], diayn_default("episode_length")] = None
    """steps per episode, one skill each (ants: 1000 as the authors)"""
    alpha: float = 0.1
    """alpha, weight of the policy's entropy"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.01
    """step of the target critics"""
    learning_rate: float = 3e-4
    """Adam step size of every network"""
    batch_size: int = 128
    """transitions per gradient step"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer"""
    learning_starts: int = 5000
    """environment steps before the first gradient step"""
    hidden: Annotated[Optional[tuple[int, ...]], diayn_default("hidden")] = None
    """units of every network's hidden layers (authors: 300 300)"""
    skill_length: Annotated[Optional[int], diayn_default("skill_length")] = None
    """steps of a skill in the picture"""
    num_envs: int = 32
    """N, agents side by side"""
    log_every: int = 500
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 5000
    """updates between two checkpoints; each holds the replay buffer"""
    tensorboard: bool = False
    """also write the rows of metrics.csv as TensorBoard events (needs tensorboard)"""


Args = Union[Annotated[DCO, tyro.conf.subcommand("dco")], Annotated[DIAYN, tyro.conf.subcommand("diayn")]]
RANGES = dict(
    seed=(0, 2**27), num_skills=(1, 64), samples=(100, 2 * 10**7), episode_length=(1, 10**5),
    pair_gap=(1, 1000), f_updates=(1, 10**8), f_batch_size=(4, 10**6), f_beta=(0, 1e6),
    f_discount=(0, 0.9999), percentile=(0.001, 99.999), policy_updates=(1, 10**8), batch_size=(1, 10**6),
    gamma=(0, 0.9999), tau=(0, 1), hidden=(1, 4096), skill_length=(1, 10**5), num_envs=(1, 4096),
    log_every=(1, 10**8), checkpoint_every=(1, 10**8), updates=(1, 10**8), updates_per_step=(1, 1000),
    alpha=(0, 1e6), learning_rate=(0, 1), buffer_size=(1, 10**7), learning_starts=(0, 10**9),
)


def resolve(args, env):
    """The values for this environment in place of None."""
    for name, value in DEFAULTS[type(args).__name__.lower()][
            "indices" if discrete(env) else "vectors"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.hidden:
        raise UsageError("--hidden is empty; give the units of at least one layer")
    if isinstance(args, DCO) and args.episode_length % args.pair_gap:
        raise UsageError(f"--pair-gap is {args.pair_gap}; "
                         f"use a divisor of --episode-length {args.episode_length}")


def discrete(env):
    """Whether states are indices and actions the four moves; otherwise vectors and torques."""
    return env.obs_scale is None


def prepare(args):
    """Builds the environment, fills in the arguments' defaults and names the run: (env, variant)."""
    if ".py:" in args.env:
        raise UsageError("DCO and DIAYN act on the gridworlds and the ants; "
                         "your own environment trains with tatc.py and laprep.py")
    gridworld.check_ranges(args, RANGES)
    env, base = make_env(args.env, args.num_envs, args.seed), type(args)(env=args.env)
    resolve(args, env)
    resolve(base, env)
    return env, gridworld.variant_name(args, base)


# --------------------------------------------------------------------------------------------------- networks
class MLP(nn.Module):
    """ReLU layers on obs and extra; obs is float [..., obs_size], scaled by constants, or a state index."""

    def __init__(self, obs_size, extra_size, hidden, outputs, obs_scale=None):
        super().__init__()
        bound = (obs_size + extra_size) ** -0.5  # torch's own default for a linear layer
        self.weight_obs = nn.Parameter(torch.empty(obs_size, hidden[0]).uniform_(-bound, bound))
        self.weight_extra = nn.Parameter(torch.empty(extra_size, hidden[0]).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(hidden[0]).uniform_(-bound, bound))
        self.register_buffer("obs_scale", None if obs_scale is None else torch.tensor(obs_scale))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(hidden, [*hidden[1:], outputs]))

    def forward(self, obs, extra=None):
        if self.obs_scale is None:
            x = F.embedding(obs, self.weight_obs) + self.bias
        else:
            x = F.linear(obs * self.obs_scale, self.weight_obs.T, self.bias)
        if extra is not None:
            x = x + extra @ self.weight_extra
        for layer in self.layers:
            x = layer(F.relu(x))
        return x


def polyak(target, online, tau):
    """target <- (1 - tau) target + tau online, parameter by parameter."""
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters()):
            slow.lerp_(fast, tau)


def squashed_gaussian(outputs, noise):
    """Torques tanh(mean + std * noise) [n, m] and log density [n]; policy outputs [n, 2 m], noise [n, m]."""
    mean, log_std = outputs.chunk(2, dim=-1)
    log_std = log_std.clamp(-5, 2)
    raw = mean + log_std.exp() * noise
    log_normal = -0.5 * noise.square() - log_std - 0.5 * np.log(2 * np.pi)
    log_slope = 2 * (np.log(2) - raw - F.softplus(-2 * raw))  # log(1 - tanh^2), without cancellation
    return torch.tanh(raw), (log_normal - log_slope).sum(-1)


# --------------------------------------------------------------------------------------------- trained skills
class Skills:
    """What a run leaves: `act`, for options `ended`. networks: DCO's list of {f, policy}, DIAYN's dict."""

    def __init__(self, args, env, networks, threshold=None):
        self.args, self.env, self.networks, self.threshold = args, env, networks, threshold

    @torch.no_grad()
    def act(self, obs, skill, rng):
        """What env.move takes: actions of `skill` [n] at obs [n, ...]."""
        obs, skill = torch.as_tensor(obs), torch.as_tensor(skill)
        if self.threshold is not None:  # DCO's options are deterministic
            outputs = self.of_each("policy", obs, skill)
            return outputs.argmax(-1).numpy() if discrete(self.env) else torch.tanh(outputs).numpy()
        outputs = self.networks["policy"](obs, F.one_hot(skill, self.args.num_skills).float())
        if discrete(self.env):
            return (outputs.numpy() + rng.gumbel(size=outputs.shape)).argmax(-1)
        noise = rng.standard_normal((len(obs), outputs.shape[-1] // 2), dtype=np.float32)
        return squashed_gaussian(outputs, torch.as_tensor(noise))[0].numpy()

    @torch.no_grad()
    def ended(self, obs, skill):
        """[n] bool: option `skill` [n] ends at obs [n, ...], and may start elsewhere; DIAYN's never end."""
        if self.threshold is None:
            return np.zeros(len(obs), dtype=bool)
        obs, skill = torch.as_tensor(obs), torch.as_tensor(skill)
        return (self.of_each("f", obs, skill)[:, 0] <= self.threshold[skill]).numpy()

    def of_each(self, name, obs, skill):
        """Outputs [n, m] of the network `name`, "f" or "policy", of each row's own option."""
        parts = {z: self.networks[z][name](obs[skill == z]) for z in skill.unique().tolist()}
        outputs = torch.empty(len(obs), next(iter(parts.values())).shape[-1])
        for z, part in parts.items():
            outputs[skill == z] = part
        return outputs


def load(path, num_envs=1, seed=0):
    """(args, env, Skills) of a run directory or checkpoint."""
    checkpoint = gridworld.load_checkpoint(path, ("dco", "diayn"))
    kind = DCO if checkpoint["script"] == "dco" else DIAYN

    def build():
        args, env = gridworld.rebuild(path, checkpoint, kind, lambda name: make_env(name, num_envs, seed))
        gridworld.check_ranges(args, RANGES)
        resolve(args, env)
        if kind is DIAYN:
            networks, threshold = make_diayn(args, env), None
        else:
            networks = nn.ModuleList(make_option(args, env) for _ in range(args.num_skills))
            threshold = checkpoint["threshold"]
            done = checkpoint["update"] // (args.f_updates + args.policy_updates)
            if done < args.num_skills:
                raise UsageError(f"{path} holds {done} of {args.num_skills} options; finish its training")
            if threshold.shape != (args.num_skills,) or not threshold.isfinite().all():
                raise ValueError
        networks.load_state_dict(checkpoint["networks"])
        return args, env, Skills(args, env, networks, threshold)

    return gridworld.load_state(path, build)


def skill_traces(skills, which, starts):
    """xy [skills, starts, T + 1, 2] of the skills `which` from the states `starts` [m, ...], and who ended,
    [skills, starts, 2].

    The last axis of the second: ended at the start, ended within T steps. An option that ended stands still.
    """
    env = make_env(skills.args.env, len(which) * len(starts), 0)
    env.place(np.ones(env.num_envs, dtype=bool), np.concatenate([starts] * len(which)))
    skill, rng = np.repeat(which, len(starts)), np.random.default_rng(0)

    def position():
        return env.truth_xy[env.obs] if discrete(env) else env.obs[:, :2]

    ended = begun_ended = skills.ended(env.obs, skill)
    traces = [position()]
    for _ in range(skills.args.skill_length):
        env.move(skills.act(env.obs, skill, rng))
        traces.append(np.where(ended[:, None], traces[-1], position()))
        ended = ended | skills.ended(env.obs, skill)
    shape = (len(which), len(starts))
    return (np.stack(traces, axis=1).reshape(*shape, -1, 2),
            np.stack([begun_ended, ended], axis=-1).reshape(*shape, 2))


# ===================================================================================== DCO: data, f, and DDPG
def sample_pairs(data, count, discount, rng):
    """(u, v), each [count, ...], from episodes data [E, K + 1, ...]: v follows u by g steps, P(g) ~
    discount^(g - 1) up to the episode's end."""
    episode, first = rng.integers(len(data), size=count), rng.integers(data.shape[1] - 1, size=count)
    left = data.shape[1] - 1 - first  # the gap is at most this
    gap = np.ones(count, dtype=np.int64)
    if discount > 0:
        gap += (np.log1p(-rng.random(count) * (1 - discount**left)) / np.log(discount)).astype(np.int64)
    return data[episode, first], data[episode, first + np.minimum(gap, left)]


def collect_walks(args, env, rng):
    """--samples random-walk steps from uniform starts, in whole episodes: obs [E, K + 1, ...] and action
    indices [E, K, heads]."""
    rounds = -(-args.samples // (args.episode_length * args.num_envs))
    heads, values = env.action_shape
    actions = rng.integers(values, size=(rounds, args.episode_length, args.num_envs, heads), dtype=np.uint8)
    obs = np.empty((rounds, args.episode_length + 1) + env.obs.shape, dtype=env.obs.dtype)
    whole = np.ones((rounds, args.num_envs), dtype=bool)
    for i in range(rounds):
        env.place(np.ones(args.num_envs, dtype=bool), "uniform")
        obs[i, 0] = env.obs
        for t in range(args.episode_length):
            obs[i, t + 1] = env.move(actions[i, t])
            if not discrete(env):
                whole[i] &= ~env.last_diverged  # such an ant jumped to s0
    return obs.swapaxes(1, 2)[whole], actions.swapaxes(1, 2)[whole]


def fiedler_loss(f_u, f_v, beta):
    """Jinnai's objective: Lap-rep's (TATC's Eq. 1) with phi = (1, f); f_u, f_v [n] of n independent pairs.

    With the first coordinate constant, ||E[phi phi^T] - I||^2 = 2 E[f]^2 + E[f^2 - 1]^2, and the square of a
    mean over states is the mean over pairs x != y of the product: ((sum_k g_k)^2 - sum_k g_k^2)
    / (n (n - 1)), unbiased.
    """
    count = len(f_u)
    attract = (f_u - f_v).square().mean()
    terms = torch.stack([f_u, f_u.square() - 1])  # [2, n]
    mean, variance = (terms.sum(1).square() - terms.square().sum(1)) / (count * (count - 1))
    return attract + beta * (2 * mean + variance), {
        "attract": attract.detach(), "mean": mean.detach(), "variance": variance.detach()}


def fiedler_cosine(f, values, vectors):
    """|cosine| of f [S], centred, with the exact second eigenvector (its eigenspace, if repeated)."""
    vectors, f = vectors - vectors.mean(0), f - f.mean()  # the ants' truth states are a sample of the nodes
    space = np.linalg.qr(vectors[:, np.abs(values - values[1]) < 1e-6 * values[1]])[0]
    return np.linalg.norm(space.T @ f) / max(np.linalg.norm(f), 1e-12)


def make_option(args, env):
    """f and policy of one option: DDPG's actor, or on a gridworld the Q-network whose argmax it is (B5)."""
    heads, values = env.action_shape
    return nn.ModuleDict({
        "f": MLP(env.obs_size, 0, (256, 256, 256), 1, env.phi_scale),
        "policy": MLP(env.obs_size, 0, args.hidden, values if discrete(env) else heads, env.obs_scale)})


def make_learner(args, env, option):
    """What learns an option and is not kept: networks by name, their targets, and the optimisers."""
    networks = {"policy": option["policy"]}
    if not discrete(env):
        networks["critic"] = MLP(env.obs_size, env.action_shape[0], args.hidden, 1, env.obs_scale)
    networks = nn.ModuleDict(networks)
    targets = copy.deepcopy(networks)
    rates = {"policy": 1e-3 if discrete(env) else 1e-4, "critic": 1e-3}
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=rates[name], fused=True)
                  for name, net in networks.items()}
    return networks, targets, optimizers | {
        "f": torch.optim.Adam(option["f"].parameters(), lr=1e-3, fused=True)}


def encode(f, states):
    """f at states [...] -> [...]; a state index goes through the network once for all its visits."""
    values = f(states) if f.obs_scale is not None else F.embedding(states, f(torch.arange(len(f.weight_obs))))
    return values.squeeze(-1)


def update_f(args, f, optimizer, walks, rng):
    """One step of f on --f-batch-size pairs of its random walks [E, K + 1, ...]."""
    pairs = torch.as_tensor(np.stack(sample_pairs(
        walks[:, :: args.pair_gap], args.f_batch_size, args.f_discount, rng)))
    loss, info = fiedler_loss(*encode(f, pairs), args.f_beta)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {f"loss/f_{key}": value for key, value in info.items()}


@torch.no_grad()
def option_dataset(args, f, walks, actions):
    """f's option: threshold and transitions (obs [n, ...], actions [n, heads], rewards [n], next_obs
    [n, ...])."""
    flat = torch.as_tensor(walks).flatten(0, 1)
    values = torch.cat(  # [E, K + 1]
        [encode(f, part) for part in flat.split(50_000)]).reshape(walks.shape[:2]).numpy()
    threshold = np.float32(np.percentile(values, args.percentile))
    rewards = (values[:, :-1] - values[:, 1:]).reshape(-1)
    rewards /= max(rewards.std(), 1e-8)  # B2
    obs, next_obs, actions = (part.reshape(-1, *part.shape[2:])
                              for part in (walks[:, :-1], walks[:, 1:], actions))
    if f.obs_scale is not None:
        actions = actions.astype(np.float32) / 2 - 1  # the torque of each index
    return threshold, (obs, actions, rewards, next_obs)


def update_option(args, networks, targets, optimizers, dataset, rng):
    """One step of DDPG (Lillicrap et al., Algorithm 1) on the ants, of Q-learning on the gridworlds (B5)."""
    index = rng.integers(len(dataset[0]), size=args.batch_size)
    obs, actions, reward, next_obs = (torch.as_tensor(part[index]) for part in dataset)
    if "critic" in networks:
        q = networks["critic"](obs, actions).squeeze(-1)
        next_value = targets["critic"](next_obs, torch.tanh(targets["policy"](next_obs))).squeeze(-1)
        optimizer = optimizers["critic"]
    else:
        q = networks["policy"](obs).gather(-1, actions.long()).squeeze(-1)
        next_value = targets["policy"](next_obs).amax(-1)
        optimizer = optimizers["policy"]
    loss = (q - (reward + args.gamma * next_value.detach())).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "critic" in networks:
        actor_loss = -networks["critic"](obs, torch.tanh(networks["policy"](obs))).mean()
        optimizers["policy"].zero_grad()
        actor_loss.backward(inputs=list(networks["policy"].parameters()))
        optimizers["policy"].step()
    for name, target in targets.items():
        polyak(target, networks[name], args.tau)
    return {"loss/critic": loss.detach(), "rollout/q": q.detach().mean()}


def train_dco(args, env, variant):
    per_option = args.f_updates + args.policy_updates
    exact = env.laplacian_eigenvectors(min(4, len(env.truth_obs)))
    with gridworld.run_directory(args, env, variant, "dco") as (run_dir, checkpoint), \
            gridworld.stop_requests() as stop:
        options = nn.ModuleList(make_option(args, env) for _ in range(args.num_skills))
        run = {"update": 0, "seconds": 0.0, "rows": [], "sums": {},
               "threshold": torch.full((args.num_skills,), math.nan)}

        def restore():
            options.load_state_dict(checkpoint["networks"])
            gridworld.restore_run(run, checkpoint)

        if checkpoint is not None:
            gridworld.load_state(run_dir, restore)
        gridworld.write_args(args, env, variant, "dco", run_dir)
        begin = time.perf_counter() - run["seconds"]
        bar = tqdm(initial=run["update"], total=args.num_skills * per_option, unit="update",
                   dynamic_ncols=True)
        for option in range(run["update"] // per_option, args.num_skills):
            # Data, networks and random numbers belong to the option: --resume makes data again from its seed.
            seed = args.seed * args.num_skills + option
            rng = np.random.default_rng(seed)
            torch.manual_seed(seed)
            if run["update"] == option * per_option:
                options[option] = make_option(args, env)
            networks, targets, optimizers = make_learner(args, env, options[option])
            bar.set_description(f"option {option}: data")
            walks, actions = collect_walks(args, make_env(args.env, args.num_envs, seed), rng)
            dataset = None

            def save():
                gridworld.save_checkpoint(run_dir, "dco", variant, env, args, run | {
                    "networks": options.state_dict(), "learner": networks.state_dict(),
                    "targets": targets.state_dict(), "rng": rng.bit_generator.state,
                    "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()}})

            def restore_learner():
                networks.load_state_dict(checkpoint["learner"])
                targets.load_state_dict(checkpoint["targets"])
                for name, optimizer in optimizers.items():
                    optimizer.load_state_dict(checkpoint["optimizers"][name])
                rng.bit_generator.state = checkpoint["rng"]

            if checkpoint is not None and run["update"] % per_option:
                gridworld.load_state(run_dir, restore_learner)
            checkpoint = None
            for number in range(run["update"] + 1, (option + 1) * per_option + 1):
                stage = (number - 1) % per_option + 1
                if stage <= args.f_updates:
                    info = update_f(args, options[option]["f"], optimizers["f"], walks, rng)
                else:
                    if dataset is None:
                        threshold, dataset = option_dataset(args, options[option]["f"], walks, actions)
                        run["threshold"][option] = float(threshold)
                    info = update_option(args, networks, targets, optimizers, dataset, rng)
                gridworld.add_to_sums(run["sums"], info, number)
                run["update"], run["seconds"] = number, time.perf_counter() - begin
                if number % args.log_every == 0 or stage in (args.f_updates, per_option):
                    row = {"update": number, "env_steps": (option + 1) * walks.shape[0] * args.episode_length,
                           "seconds": run["seconds"], "rollout/option": option}
                    with torch.no_grad():
                        f = options[option]["f"](torch.as_tensor(env.truth_obs)).squeeze(-1).numpy()
                    row |= {"eval/f_extent": np.ptp(f), "eval/fiedler_cosine": fiedler_cosine(f, *exact)}
                    if stage == per_option:
                        _, ended = skill_traces(
                            Skills(args, env, options, run["threshold"]), [option], env.truth_obs)
                        starts = ~ended[..., 0]
                        row |= {"eval/initiation": starts.mean(),
                                "eval/reaches": ended[starts, 1].mean() if starts.any() else 1.0}
                    gridworld.log_row(args, run, row, run_dir, bar, ("f_extent", "fiedler_cosine", "reaches"))
                bar.set_description(f"option {option}: {'f' if stage <= args.f_updates else 'policy'}",
                                    refresh=False)
                bar.update()
                gridworld.save_or_stop(number % args.checkpoint_every == 0 or stage == per_option, stop, save)
        bar.close()
        finish_dco(args, env, Skills(args, env, options, run["threshold"]), run["rows"], run_dir)


def finish_dco(args, env, skills, rows, run_dir):
    """phi.npz, the pictures, and the last numbers."""
    with torch.no_grad():
        f = np.stack([option["f"](torch.as_tensor(env.truth_obs)).squeeze(-1).numpy()
                      for option in skills.networks])  # [options, S]
    distance = env.distance[env.start_index]
    arrays = dict(xy=env.truth_xy, phi=f.T, distance=distance, start=env.start_index,
                  threshold=skills.threshold.numpy())
    np.savez_compressed(run_dir / "phi.npz", **arrays)
    starts = env.truth_obs[
        np.argsort(distance, kind="stable")[np.linspace(0, len(distance) - 1, 12).astype(int)]]
    traces, _ = skill_traces(skills, list(range(args.num_skills)), starts)
    titles = [f"option {z}: ends where f <= {threshold:.2f}" for z, threshold in enumerate(skills.threshold)]
    gridworld.draw_traces(run_dir / "skills.png", env, f, traces, titles)
    gridworld.draw_curves(run_dir / "curves.png", {args.env: [rows]})
    for key in ("eval/fiedler_cosine", "eval/reaches"):
        values = [row[key] for row in rows if "eval/reaches" in row]
        print(f"{key} of the {len(values)} options: " + " ".join(f"{value:.3f}" for value in values))
    print(f"{rows[-1]['seconds'] / 60:.1f} minutes; pictures: {run_dir}/skills.png, curves.png")


# ============================================================================= DIAYN: SAC and a discriminator
class Replay:
    """The newest transitions as float32 rows of columns with the given widths. Small integers are exact."""

    def __init__(self, size, widths):
        self.rows = np.zeros((size, sum(widths)), dtype=np.float32)
        self.splits = np.cumsum(widths)[:-1].tolist()
        self.position, self.filled = 0, 0

    def add(self, *columns):
        """Columns [n, ...] in the rows' order."""
        rows = np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1)
        self.rows[(self.position + np.arange(len(rows))) % len(self.rows)] = rows
        self.position = (self.position + len(rows)) % len(self.rows)
        self.filled = min(self.filled + len(rows), len(self.rows))

    def sample(self, shape, rng):
        """Independent rows: a tensor [*shape, width] of each column."""
        return torch.as_tensor(self.rows[rng.integers(self.filled, size=shape)]).tensor_split(
            self.splits, dim=-1)

    def load(self, rows, position):
        """Goes on from the filled rows of another one."""
        self.rows[: len(rows)], self.filled, self.position = rows, len(rows), position


def make_diayn(args, env):
    """Policy, two critics and the discriminator."""
    heads, values = env.action_shape
    policy_outputs, extra, q_outputs = (values, 0, values) if discrete(env) else (2 * heads, heads, 1)
    seen = (env.obs_scale if args.discriminator == "state"
            else env.obs_scale * (np.arange(env.obs_size) < 2).astype(np.float32))
    return nn.ModuleDict({
        "policy": MLP(env.obs_size, args.num_skills, args.hidden, policy_outputs, env.obs_scale),
        "discriminator": MLP(env.obs_size, 0, args.hidden, args.num_skills, seen),
        "q1": MLP(env.obs_size, args.num_skills + extra, args.hidden, q_outputs, env.obs_scale),
        "q2": MLP(env.obs_size, args.num_skills + extra, args.hidden, q_outputs, env.obs_scale)})


def value_and_log_prob(policy, critics, obs, code, noise):
    """min Q [n] and log pi [n] at obs [n, ...], code [n, skills]: at one sampled action, or without noise
    their exact mean (B5)."""
    outputs = policy(obs, code)
    if noise is None:
        log_pi = F.log_softmax(outputs, dim=-1)
        q = torch.minimum(critics["q1"](obs, code), critics["q2"](obs, code))
        return (log_pi.exp() * q).sum(-1), (log_pi.exp() * log_pi).sum(-1)
    action, log_prob = squashed_gaussian(outputs, noise)
    extra = torch.cat([code, action], dim=-1)
    return torch.minimum(critics["q1"](obs, extra), critics["q2"](obs, extra)).squeeze(-1), log_prob


def skill_reward_diayn(logits, skill):
    """DIAYN's reward: log q(z|s') - log p(z) [n], p uniform; logits [n, skills] of q at s', skill [n]."""
    return -F.cross_entropy(logits, skill, reduction="none") + np.log(logits.shape[-1])


def update_sac(args, networks, targets, optimizers, obs, action, next_obs, reward, code, noise):
    """One step of SAC: critics, policy, target critics; action [n, m] torques or [n, 1] moves, noise
    [2, n, m] or (None, None)."""
    with torch.no_grad():
        next_q, next_log_prob = value_and_log_prob(networks["policy"], targets, next_obs, code, noise[0])
        target = reward + args.gamma * (next_q - args.alpha * next_log_prob)  # episodes are cut, not terminal
    if noise[0] is None:
        q1, q2 = (networks[name](obs, code).gather(-1, action.long()).squeeze(-1) for name in ("q1", "q2"))
    else:
        extra = torch.cat([code, action], dim=-1)
        q1, q2 = (networks[name](obs, extra).squeeze(-1) for name in ("q1", "q2"))
    critic_loss = (q1 - target).square().mean() + (q2 - target).square().mean()
    optimizers["critics"].zero_grad()
    critic_loss.backward()
    optimizers["critics"].step()

    q, log_prob = value_and_log_prob(networks["policy"], networks, obs, code, noise[1])
    policy_loss = (args.alpha * log_prob - q).mean()
    optimizers["policy"].zero_grad()
    policy_loss.backward(inputs=list(networks["policy"].parameters()))  # the critics need no gradients here
    optimizers["policy"].step()
    for name, critic in targets.items():
        polyak(critic, networks[name], args.tau)
    return {"loss/critic": critic_loss.detach(), "loss/policy": policy_loss.detach(),
            "rollout/entropy": -log_prob.detach().mean()}


def update_discriminator(discriminator, optimizer, next_obs, skill):
    """One step of q(z|s') by maximum likelihood; returns the skills' reward [n], from before it."""
    logits = discriminator(next_obs)
    loss = F.cross_entropy(logits, skill)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return skill_reward_diayn(logits.detach(), skill), {"loss/discriminator": loss.detach()}


def update(args, networks, targets, optimizers, replay, index_states, rng):
    """--updates-per-step gradient steps of the discriminator and of SAC."""
    shape = (args.updates_per_step, args.batch_size)
    obs, action, next_obs, skill = replay.sample(shape, rng)
    if index_states:
        obs, next_obs = obs.squeeze(-1).long(), next_obs.squeeze(-1).long()
        noise = [(None, None)] * args.updates_per_step
    else:
        noise = torch.as_tensor(rng.standard_normal((shape[0], 2, *action.shape[1:]), dtype=np.float32))
    skill = skill.squeeze(-1).long()
    code = F.one_hot(skill, args.num_skills).float()
    for i in range(args.updates_per_step):
        reward, info = update_discriminator(networks["discriminator"], optimizers["discriminator"],
                                            next_obs[i], skill[i])
        info |= update_sac(args, networks, targets, optimizers, obs[i], action[i], next_obs[i], reward,
                           code[i], noise[i])
    return info | {"rollout/reward": reward.mean()}


def train_diayn(args, env, variant):
    if args.num_skills < 2 or (args.discriminator == "xy" and discrete(env)):
        raise UsageError("DIAYN needs --num-skills 2 or more, and --discriminator xy an ant maze")
    with gridworld.run_directory(args, env, variant, "diayn", ("updates",)) as (run_dir, checkpoint), \
            gridworld.stop_requests() as stop:
        torch.manual_seed(args.seed)
        rng = np.random.default_rng(args.seed)
        networks = make_diayn(args, env)
        targets = copy.deepcopy(nn.ModuleDict({name: networks[name] for name in ("q1", "q2")}))
        groups = {"policy": ("policy",), "critics": ("q1", "q2"), "discriminator": ("discriminator",)}
        optimizers = {name: torch.optim.Adam(
            [parameter for net in nets for parameter in networks[net].parameters()],
            lr=args.learning_rate, fused=True) for name, nets in groups.items()}
        skills = Skills(args, env, networks)
        width = 1 if discrete(env) else env.obs_size
        widths = width, env.action_shape[0], width, 1  # obs, action, next obs, skill
        replay = Replay(args.buffer_size, widths)
        run = {"update": 0, "seconds": 0.0, "rows": [], "sums": {},
               "visits": torch.zeros(env.num_cells, dtype=torch.long),
               "ever": torch.zeros(env.num_cells, dtype=torch.bool),
               # Episodes do not all end together (B7).
               "elapsed": torch.arange(args.num_envs) * args.episode_length // args.num_envs,
               "skill": torch.as_tensor(rng.integers(args.num_skills, size=args.num_envs))}
        env.place(np.ones(args.num_envs, dtype=bool), "s0")

        def restore():
            networks.load_state_dict(checkpoint["networks"])
            targets.load_state_dict(checkpoint["targets"])
            for name, optimizer in optimizers.items():
                optimizer.load_state_dict(checkpoint["optimizers"][name])
            replay.load(checkpoint["replay"].numpy(), checkpoint["position"])
            env.set_state(checkpoint["env"])
            rng.bit_generator.state = checkpoint["rng"]
            gridworld.restore_run(run, checkpoint)

        def save():
            gridworld.save_checkpoint(run_dir, "diayn", variant, env, args, run | {
                "networks": networks.state_dict(), "targets": targets.state_dict(),
                "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
                "replay": torch.as_tensor(replay.rows[: replay.filled]), "position": replay.position,
                "env": gridworld.as_tensors(env.get_state()), "rng": rng.bit_generator.state})

        if checkpoint is not None:
            gridworld.load_state(run_dir, restore)
        gridworld.write_args(args, env, variant, "diayn", run_dir)
        elapsed, skill = run["elapsed"].numpy(), run["skill"].numpy()  # views: changes reach the checkpoint
        begin = time.perf_counter() - run["seconds"]
        bar = tqdm(range(run["update"] + 1, args.updates + 1), initial=run["update"], total=args.updates,
                   unit="step", dynamic_ncols=True)
        for number in bar:
            ended = elapsed >= args.episode_length
            if ended.any():
                env.place(ended, "s0")
                skill[ended] = rng.integers(args.num_skills, size=ended.sum())
                elapsed[ended] = 0
            obs, action = env.obs, skills.act(env.obs, skill, rng)
            next_obs = env.move(action)
            elapsed += 1
            good = np.ones(args.num_envs, dtype=bool) if discrete(env) else ~env.last_diverged
            elapsed[~good] = args.episode_length  # that ant was put back to s0: no transition, a new episode
            replay.add(obs[good], action[good], next_obs[good], skill[good])
            with torch.no_grad():
                guess = networks["discriminator"](torch.as_tensor(next_obs)).argmax(-1).numpy()
            run["visits"] += torch.as_tensor(np.bincount(env.cell(next_obs), minlength=env.num_cells))
            info = {"eval/accuracy": (guess == skill).mean(), "rollout/fallen": env.fallen().mean()}
            if number * args.num_envs >= args.learning_starts:
                info |= update(args, networks, targets, optimizers, replay, discrete(env), rng)
            gridworld.add_to_sums(run["sums"], info, number)
            run["update"], run["seconds"] = number, time.perf_counter() - begin
            if number % args.log_every == 0 or number == args.updates:
                row = {"update": number, "env_steps": number * args.num_envs, "seconds": run["seconds"]}
                gridworld.log_row(args, run, row | gridworld.coverage(run, env), run_dir, bar,
                                  ("accuracy", "coverage", "far"))
                run["visits"][:] = 0
            gridworld.save_or_stop(number % args.checkpoint_every == 0 or number == args.updates, stop, save)
        finish_diayn(args, env, skills, run["rows"], run_dir)


def finish_diayn(args, env, skills, rows, run_dir):
    """The pictures, 4 traces of every skill from s0 over q(z|s) in the first, and the last numbers."""
    with torch.no_grad():
        q = skills.networks["discriminator"](  # [skills, S]
            torch.as_tensor(env.truth_obs)).softmax(-1).T.numpy()
    starts = np.stack([env.truth_obs[env.start_index]] * 4)
    traces, _ = skill_traces(skills, list(range(args.num_skills)), starts)
    gridworld.draw_traces(run_dir / "skills.png", env, q, traces,
                          [f"skill {z}, q(z|s)" for z in range(args.num_skills)])
    gridworld.draw_curves(run_dir / "curves.png", {args.env: [rows]})
    print(", ".join(f"{key.split('/')[1]} {value:.3f}" for key, value in rows[-1].items()
                    if key.startswith("eval/")))
    print(f"{rows[-1]['env_steps'] / rows[-1]['seconds']:,.0f} environment steps per second, "
          f"{rows[-1]['seconds'] / 60:.1f} minutes")
    print(f"pictures: {run_dir}/skills.png, curves.png")


# ======================================================================================================= both
def train(args):
    torch.set_num_threads(1)  # networks this small run slower on more threads
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages: 2x slower
    env, variant = prepare(args)
    return (train_dco if isinstance(args, DCO) else train_diayn)(args, env, variant)


if __name__ == "__main__":
    gridworld.guarded(lambda: train(tyro.cli(Args)))

"""TATC: Temporal Abstractions-Augmented Temporally Contrastive Learning (Erraqabi et al., UAI 2022).

    python tatc.py --env umaze       # 3 to 8 minutes on one core
    python tatc.py --env antmaze1    # 20 to 40 minutes on one core

Learns a 2-D representation phi of an environment together with eight directional skills, from one start
state. Writes args.json, metrics.csv, checkpoint.pt, phi.npz and the pictures representation.png,
progress.png, skills.png, curves.png to the run directory.

Departures from the paper (evidence: README.md):
D1  Eq. 5 is read as the mean over steps of the squared norm (--boredom selects the other readings).
D2  An update uses N episodes of L skills, as in Algorithm 1; the text's "N trajectories of length c" is
    --skills-per-update 1, the default on the ants: pi_hi then learns every L-th update, when episodes end.
D3  Open in the paper: the critics are separate networks of the policies' shape that also see the time left.
D4  The entropy coefficient of pi_low is 1 on the gridworlds other than U-Maze (paper: 0.1).
D5  On the ants both policies learn by PPO with Adam: 4 passes of 8 minibatches (pi_hi: 8 passes over its
    whole batch), ratio clipped at 0.2, gradient norm at 0.5, normalised advantages; for pi_low GAE with
    lambda 0.9, entropy coefficient 0.003 (--policy-update a2c is the paper's, with RMSprop; it also undoes
    D9, D10 and D11's step sizes).
D6  On the ants the pairs of the attractive term and of Eq. 5 are 10 steps apart (--pair-gap 1 is the
    paper's), and phi sees x, y at four times and everything else at a fiftieth of the policies' scale
    (antmaze.py, phi_scale).
D7  An ant that lies on its back when an episode begins starts at s0. One whose simulation diverges goes on
    from s0 at once; rollout/diverged counts them.
D8  On the ants phi learns from every 10th state of the last 20 updates (--phi-memory 1 is the paper's).
D9  On the ants the length of a step in Eq. 3 has the mean length added (--step-floor 0 is the paper's).
D10 After 1000 updates an ant that falls on its back pays 20 in place of Eq. 3, and pi_low learns nothing from
    the rest of that skill (--fall-cost 0 is the paper's).
D11 On the ants training ends after 6000 updates, on AntMaze-1 after 3000 (paper: 10,000), and the step sizes
    go linearly to 0 in the second half (--anneal 0 --updates 10000 is the paper's).
D12 Open in the paper: RMSprop's alpha 0.99 and eps 1e-8 are torch's; the critics' loss has weight 1 (PPO:
    0.5); losses are means over choices; phi takes one step per update, with as many random pairs in Eq. 2 as
    transitions; N agents run side by side, each continuing where its own last episode ended (Algorithm 1 runs
    N episodes one after the other).
"""

import math
import time
from collections import deque
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

# Values per environment: the appendix's, except where a departure is named. "indices" is any environment with
# state indices as observations, "vectors" any with float vectors, "ants" what only they have (env.defaults).
# What is missing here comes from the way the policies learn, below.
DEFAULTS = {
    "umaze": dict(reset_prob=0.3, random_walk_prob=0.4, episode_length=90, skill_length=30,
                  low_entropy_coef=0.1),
    "tmaze": dict(reset_prob=0.2, random_walk_prob=0.4, episode_length=40, skill_length=20),
    "4rooms": dict(reset_prob=0.25, random_walk_prob=0.5, episode_length=60, skill_length=20),
    "indices": dict(reset_prob=0.25, random_walk_prob=0.5, skill_length=20, boredom_coef=2.0, pair_gap=1,
                    phi_memory=1, step_floor=0.0, fall_cost=0.0, high_entropy_coef=0.3,
                    low_entropy_coef=1.0,  # D4
                    policy_update="a2c", updates=7000),
    "vectors": dict(reset_prob=0.2, random_walk_prob=0.3, episode_length=500, skill_length=100,
                    boredom_coef=5.0, pair_gap=1, step_floor=0.0, fall_cost=0.0, high_entropy_coef=0.15,
                    skills_per_update=1, policy_update="ppo", phi_memory=20, updates=6000),  # D2, D5, D8, D11
    "ants": dict(pair_gap=10, step_floor=1.0, fall_cost=20.0),  # D6, D9, D10
    "antmaze1": dict(updates=3000),  # D11
}
# Vanilla A2C with Monte-Carlo returns is PPO's loss with one pass over one batch and lambda = 1: one
# implementation serves both (D5). Returns are not discounted. D9, D10 and annealing go with PPO.
POLICY_UPDATES = {
    "a2c": dict(update_epochs=1, gae_lambda=1.0, norm_adv=False, low_entropy_coef=0.1, anneal=0.0,
                step_floor=0.0, fall_cost=0.0),
    "ppo": dict(update_epochs=4, gae_lambda=0.9, norm_adv=True, low_entropy_coef=0.003, anneal=0.5),
}
FALL_AFTER = 1000  # updates before a fall costs anything: ants learn to move first (D10)
CLIP_COEF = 0.2


default = partial(gridworld.default, DEFAULTS | POLICY_UPDATES)


@dataclass
class Args:
    env: str = "umaze"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, antmaze-large, maze file, ant:FILE, your FILE.py:FUNCTION"""
    seed: int = 0
    """seed of everything: networks, policies, environment"""
    run_dir: Annotated[Optional[str], tyro.conf.arg(
        help_behavior_hint="(default: runs/tatc/<env>/<variant>/seed<seed>)")] = None
    """where to write"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    updates: Annotated[Optional[int], default("updates")] = None
    """number of updates (paper: 7000 on the gridworlds, 10000 on the ants)"""
    prior: Literal["s0", "uniform"] = "s0"
    """s0: episodes start where the last ended, or at s0 with probability p_r; uniform: at any free state"""
    beta: float = 0.2
    """beta, weight of the repulsive term, Eq. 2"""
    boredom_coef: Annotated[Optional[float], default("boredom_coef")] = None
    """beta', weight of the boredom term, Eq. 6; 0 is the paper's ablation"""
    boredom: Literal["squared_mean", "mean", "squared_sum", "sum"] = "squared_mean"
    """reading of Eq. 5: mean or sum over the c steps of the squared or plain norm; sum is the literal text"""
    pair_gap: Annotated[Optional[int], default("pair_gap")] = None
    """steps between the two states of a pair in the attractive term of Eq. 2 and in Eq. 5 (paper: 1)"""
    phi_memory: Annotated[Optional[int], default("phi_memory")] = None
    """updates whose trajectories phi learns from, the last one included (paper: 1)"""
    step_floor: Annotated[Optional[float], default("step_floor")] = None
    """what is added to the length of a step in Eq. 3, in mean lengths (paper: 0)"""
    fall_cost: Annotated[Optional[float], default("fall_cost")] = None
    """what falling costs in place of Eq. 3 (paper: nothing; 0: steps on the back count like others)"""
    dim: int = 2
    """d, dimension of phi"""
    num_directions: int = 8
    """number of directions in Omega, on the circle of phi's first two dimensions"""
    reset_prob: Annotated[Optional[float], default("reset_prob")] = None
    """p_r, probability that an episode starts at s0"""
    random_walk_prob: Annotated[Optional[float], default("random_walk_prob")] = None
    """p_rw, probability that an episode is a random walk"""
    episode_length: Annotated[Optional[int], default("episode_length")] = None
    """K, steps per episode; for a gridworld of your own its furthest state's distance, in whole skills"""
    skill_length: Annotated[Optional[int], default("skill_length")] = None
    """c, steps per skill; L = K / c"""
    num_envs: int = 32
    """N, episodes collected side by side"""
    skills_per_update: Annotated[Optional[int], tyro.conf.arg(
        help_behavior_hint="(default: L, vectors 1)")] = None
    """skills of every episode between two updates: L (Algorithm 1) or 1 (the text)"""
    hidden: int = 128
    """units in each of the two hidden layers"""
    learning_rate: float = 1e-3
    """step size of every network: RMSprop, with PPO Adam for the policies and critics"""
    anneal: Annotated[Optional[float], default("anneal")] = None
    """share of updates, the last ones, over which every step size goes linearly to 0 (paper: 0, constant)"""
    high_entropy_coef: Annotated[Optional[float], default("high_entropy_coef")] = None
    """entropy coefficient of pi_hi"""
    low_entropy_coef: Annotated[Optional[float], default("low_entropy_coef")] = None
    """entropy coefficient of pi_low; the entropy is summed over the action's heads (paper: 0.1)"""
    policy_update: Annotated[Optional[Literal["a2c", "ppo"]], default("policy_update")] = None
    """how the policies learn: the paper's vanilla A2C with Monte-Carlo returns, or PPO"""
    update_epochs: Annotated[Optional[int], default("update_epochs")] = None
    """passes of pi_low over a batch; with PPO in 8 minibatches each, for pi_hi 8 steps on its whole batch"""
    gae_lambda: Annotated[Optional[float], default("gae_lambda")] = None
    """lambda of pi_low's GAE; 1 is the Monte-Carlo return"""
    norm_adv: Annotated[Optional[bool], default("norm_adv")] = None
    """advantages with mean 0 and deviation 1"""
    log_every: int = 100
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 500
    """updates between two checkpoints"""
    tensorboard: bool = False
    """also write the rows of metrics.csv as TensorBoard events (needs tensorboard)"""


RANGES = dict(
    seed=(0, 2**31), updates=(1, 10**8), beta=(0, 1e6), boredom_coef=(0, 1e6), pair_gap=(1, 10**4),
    phi_memory=(1, 1000), step_floor=(0, 1e6), fall_cost=(0, 1e6), dim=(2, 64), num_directions=(1, 256),
    reset_prob=(0, 1), random_walk_prob=(0, 1), episode_length=(1, 10**5), skill_length=(1, 10**4),
    num_envs=(1, 4096), skills_per_update=(1, 10**4), hidden=(1, 4096), learning_rate=(0, 1), anneal=(0, 1),
    high_entropy_coef=(0, 1e6), low_entropy_coef=(0, 1e6), update_epochs=(1, 1000), gae_lambda=(0, 1),
    log_every=(1, 10**8), checkpoint_every=(1, 10**8),
)


def resolve(args, env):
    """Replaces every None by its value for this environment; checks that c divides K, pair_gap c, and
    skills_per_update L."""
    kind = "indices" if env.obs_scale is None else "vectors"
    values = DEFAULTS[kind] | DEFAULTS.get(getattr(env, "defaults", None), {}) | DEFAULTS.get(args.env, {})
    args.policy_update = args.policy_update or values["policy_update"]
    preset = POLICY_UPDATES[args.policy_update]
    usual = args.policy_update == values["policy_update"]  # the environment's values were chosen for this one
    for name, value in (preset | values if usual else values | preset).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.episode_length is None:
        furthest = 5 * args.skill_length if env.distance is None else env.distance[env.start_index].max()
        args.episode_length = math.ceil(furthest / args.skill_length) * args.skill_length
    skills = args.episode_length // args.skill_length
    args.skills_per_update = args.skills_per_update or skills
    for name, whole, of in (("skill_length", args.episode_length, "--episode-length"),
                            ("pair_gap", args.skill_length, "--skill-length"),
                            ("skills_per_update", skills, "L = K / c =")):
        if whole % getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; "
                             f"use a divisor of {of} {whole}")


def prepare(args):
    """Builds the environment, fills in the arguments' defaults and names the run: (env, variant). Values that
    come with --policy-update are not part of the name."""
    gridworld.check_ranges(args, RANGES)
    env = make_env(args.env, args.num_envs, args.seed)
    resolve(args, env)
    plain, base = Args(env=args.env), Args(env=args.env, policy_update=args.policy_update)
    resolve(plain, env)
    resolve(base, env)
    base.policy_update = plain.policy_update
    return env, gridworld.variant_name(args, base)


# --------------------------------------------------------------------------------------------------- networks
class Net(nn.Module):
    """MLP with two hidden tanh layers on the concatenation of obs and extra.

    obs is a float vector [..., obs_size], scaled by fixed constants, or a state index [...]: the one-hot code
    of a state times the first layer's weight is a row of it.
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
        if self.obs_scale is None:
            first = F.embedding(obs, self.weight_obs) + self.bias
        else:
            first = F.linear(obs * self.obs_scale, self.weight_obs.T, self.bias)
        if extra is not None:
            first = first + extra @ self.weight_extra
        return self.out(torch.tanh(self.middle(torch.tanh(first))))


def make_networks(args, env):
    """phi, the two policies, and a critic for each (D3)."""
    heads, values = env.action_shape

    def net(extra_size, outputs, scale=env.obs_scale):
        return Net(env.obs_size, extra_size, outputs, args.hidden, scale)

    return nn.ModuleDict({
        "phi": net(0, args.dim, env.phi_scale), "pi_hi": net(0, args.num_directions), "v_hi": net(1, 1),
        "pi_low": net(args.dim, heads * values), "v_low": net(args.dim + 1, 1)})


def make_optimizers(args, networks):
    """RMSprop as in the paper, with torch's constants (D12); with PPO, Adam for policies and critics (D5)."""
    policies = torch.optim.RMSprop if args.policy_update == "a2c" else partial(torch.optim.Adam, fused=True)
    low = [*networks["pi_low"].parameters(), *networks["v_low"].parameters()]
    high = [*networks["pi_hi"].parameters(), *networks["v_hi"].parameters()]
    return {"phi": torch.optim.RMSprop(networks["phi"].parameters(), lr=args.learning_rate),
            "low": policies(low, lr=args.learning_rate), "high": policies(high, lr=args.learning_rate)}


def make_directions(args):
    """Omega [n, d]: (cos(2 k pi / n), sin(2 k pi / n)), zero in any further dimension."""
    angles = 2 * np.pi * np.arange(args.num_directions) / args.num_directions
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return F.pad(torch.as_tensor(directions, dtype=torch.float32), (0, args.dim - 2))


# ----------------------------------------------------------------------------------------------------- losses
def contrastive_loss(phi_u, phi_v, phi_x, phi_y, beta):
    """Eq. 2: transitions (u, v) [n, d] of random walks attract, independent pairs (x, y) [m, d] repel."""
    attract = (phi_u - phi_v).square().sum(-1).mean()
    repel = torch.exp(-(phi_x - phi_y).norm(dim=-1)).mean()
    return attract + beta * repel, {"attract": attract.detach(), "repel": repel.detach()}


def skill_reward(phi_s, phi_next, delta, floor=0.0):
    """Eq. 3: cosine [...] of the step phi_s -> phi_next [..., d] and delta [..., d]; 0 if phi does not move.

    D9: `floor` times the batch's mean length is added to the step's: small steps earn less than large ones.
    """
    step = phi_next - phi_s
    norm = step.norm(dim=-1)
    return torch.where(norm > 0, (step * delta).sum(-1) / (norm + floor * norm.mean()), 0.0)


def high_return(phi_first, phi_final):
    """Eq. 4: the return [n] of each of the L choices of an episode from phi_first to phi_final [n, d]."""
    return (phi_first - phi_final).norm(dim=-1)


def boredom_loss(phi_tau, reading):
    """Eq. 5: length of skill trajectories phi_tau [n, c + 1, d]; D1 is the reading "squared_mean"."""
    step = phi_tau[:, 1:] - phi_tau[:, :-1]
    length = step.square().sum(-1) if reading.startswith("squared") else step.norm(dim=-1)  # [n, c]
    return (length.mean(1) if reading.endswith("mean") else length.sum(1)).mean()


def tatc_loss(args, encode, walks, skill_paths, rng):
    """Eq. 6: Eq. 2 on D_mu (walks [n, steps, ...]) plus beta' times Eq. 5 on D_s (skill_paths
    [m, steps, ...]); either may be empty."""
    loss, info = torch.zeros(()), {}
    if len(walks):
        phi_walk = encode(walks)
        phi_u, phi_v = (part.reshape(-1, args.dim) for part in (phi_walk[:, :-1], phi_walk[:, 1:]))
        pairs = torch.as_tensor(rng.integers(len(phi_u), size=(2, len(phi_u))))
        phi_x, phi_y = F.embedding(pairs, phi_u)
        loss, info = contrastive_loss(phi_u, phi_v, phi_x, phi_y, args.beta)
    if len(skill_paths):
        boredom = boredom_loss(encode(skill_paths), args.boredom)
        loss = loss + args.boredom_coef * boredom
        info["boredom"] = boredom.detach()
    return loss, info


def ppo_loss(log_prob, entropy, value, old_log_prob, advantage, returns, entropy_coef, value_coef):
    """PPO's clipped objective, entropy bonus and the critic's error, all [n]; at ratio 1, before the first
    step, its gradient is A2C's."""
    ratio = (log_prob - old_log_prob).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF) * advantage)
    policy_loss = -gain.mean() - entropy_coef * entropy.mean()
    value_loss = (value - returns).square().mean()
    info = {"policy": policy_loss.detach(), "value": value_loss.detach(), "entropy": entropy.mean().detach()}
    return policy_loss + value_coef * value_loss, info


def lambda_returns(rewards, values, ended, gae_lambda):
    """TD(lambda) returns [n, T] = GAE's advantages + values; lambda = 1 gives Monte-Carlo returns.

    rewards, values [n, T]; ended [n, T]: nothing follows that step. Nothing follows the last step either.
    """
    returns = rewards.clone()
    for t in range(rewards.shape[1] - 2, -1, -1):
        following = (1 - gae_lambda) * values[:, t + 1] + gae_lambda * returns[:, t + 1]
        returns[:, t] += torch.where(ended[:, t], 0.0, following)
    return returns


# ---------------------------------------------------------------------------------------------------- rollout
@torch.no_grad()
def skill_policy(pi_low, omega, action_shape, obs, skill):
    """Probabilities [..., heads, values] of pi_low at obs (indices [...] or vectors [..., obs_size]) for
    skills [...], rows of omega."""
    obs, skill = torch.as_tensor(obs), torch.as_tensor(skill)
    return F.softmax(pi_low(obs, omega[skill]).unflatten(-1, action_shape), dim=-1).numpy()


def make_actor(pi_low, omega, action_shape, rng):
    """act(obs [N, ...], skill [N]) -> actions [N, heads], sampled from pi_low; skill n is the random walk.

    With state indices all probabilities are computed once, because a network's call costs more than a step.
    """
    heads, values = action_shape
    if pi_low.obs_scale is None:
        states, skills = np.arange(len(pi_low.weight_obs))[:, None], np.arange(len(omega))[None]
        table = skill_policy(pi_low, omega, action_shape, states, skills)  # [S, n, heads, values]
        walk = np.full_like(table[:, :1], 1 / values)
        table = np.concatenate([table, walk], axis=1).cumsum(-1)
        return lambda obs, skill: (rng.random((len(obs), heads, 1)) > table[obs, skill, :, :-1]).sum(-1)

    @torch.no_grad()
    def act(obs, skill):
        walk = skill == len(omega)
        logits = pi_low(torch.as_tensor(obs),
                        omega[np.where(walk, 0, skill)]).numpy().reshape(-1, heads, values)
        logits[walk] = 0.0
        gumbel = -np.log(rng.standard_exponential(logits.shape, dtype=np.float32).clip(1e-30))
        return (logits + gumbel).argmax(-1)

    return act


@torch.no_grad()
def choose_skills(pi_hi, obs, rng):
    """Directions [N] sampled from pi_hi at obs [N, ...]."""
    logits = pi_hi(torch.as_tensor(obs)).numpy()
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)


def start_episodes(args, env, rng):
    """Algorithm 1, lines 5-7: place the agents; returns which of them [N] walk randomly for this episode."""
    if args.prior == "uniform":
        env.place(np.ones(args.num_envs, dtype=bool), "uniform")
    else:
        env.place((rng.random(args.num_envs) < args.reset_prob) | env.fallen(), "s0")  # D7
    return rng.random(args.num_envs) < args.random_walk_prob


def rollout(args, env, networks, omega, random_walk, rng):
    """Algorithm 1, lines 8-13: J = skills_per_update skills of c steps per agent, or a random walk as long.

    Returns tensors obs [J, N, c + 1, ...], actions [J, N, c, heads], skill [J, N] (n for a random walk) and
    fallen [J, N, c + 1].
    """
    act, parts = make_actor(networks["pi_low"], omega, env.action_shape, rng), []
    for _ in range(args.skills_per_update):  # D2
        skill = np.where(random_walk, args.num_directions, choose_skills(networks["pi_hi"], env.obs, rng))
        obs, actions, fallen = [env.obs], [], [env.fallen()]
        for _ in range(args.skill_length):
            actions.append(act(env.obs, skill))
            obs.append(env.move(actions[-1]))
            fallen.append(env.fallen())
        parts.append((np.stack(obs, axis=1), np.stack(actions, axis=1), skill, np.stack(fallen, axis=1)))
    return [torch.as_tensor(np.stack(part)) for part in zip(*parts)]


# ----------------------------------------------------------------------------------------------------- update
def encoder(phi):
    """phi of observations [...] -> [..., d]; a state index goes through the network once for all visits."""
    if phi.obs_scale is not None:
        return phi
    table = phi(torch.arange(len(phi.weight_obs)))
    return lambda states: F.embedding(states, table)


def log_prob_and_entropy(logits, actions):
    """log pi(a|s) and entropy [n] of independent heads: logits [n, heads, values], actions [n, heads]."""
    log_pi = F.log_softmax(logits, dim=-1)
    return log_pi.gather(-1, actions[..., None]).squeeze(-1).sum(-1), -(log_pi.exp() * log_pi).sum((-1, -2))


def update_policy(args, level, policy, critic, optimizer, obs, delta, actions, rewards, fallen, rng):
    """A2C or PPO on n trajectories of T choices; level is "low" or "high".

    obs [n, T, ...], delta [n, d] (the skill's direction; d = 0 for pi_hi), actions [n, T, heads],
    rewards [n, T], fallen [n, T + 1]: choices made after a fall are left out, and returns end with the fall.
    Returns the terms of the last loss.
    """
    count, steps = rewards.shape
    ppo, low = args.policy_update == "ppo", level == "low"
    gae_lambda = args.gae_lambda if low else 1.0  # Eq. 4 is a return already
    entropy_coef = args.low_entropy_coef if low else args.high_entropy_coef
    epochs = 8 if ppo and not low else args.update_epochs
    minibatches = 8 if ppo and low else 1
    delta = delta[:, None].expand(-1, steps, -1)  # [n, T, d]
    time_left = (1 - torch.arange(steps) / steps)[:, None].expand(count, -1, -1)  # [n, T, 1]
    upright = ~fallen[:, :-1]
    if upright.sum() < max(minibatches, 1 + args.norm_adv):  # too few to split or to normalise
        return {}

    def outputs(obs, delta, time_left, actions):
        """log pi, entropy and value, each [...], of inputs [..., size]."""
        logits = policy(obs, delta).unflatten(-1, (actions.shape[-1], -1))
        value = critic(obs, torch.cat([delta, time_left], dim=-1)).squeeze(-1)
        return *log_prob_and_entropy(logits, actions), value

    inputs = obs, delta, time_left, actions
    with torch.no_grad():
        old_log_prob, _, value = outputs(*inputs)  # [n, T]
    returns = lambda_returns(rewards, value, fallen[:, 1:], gae_lambda)
    advantage = returns - value
    if args.norm_adv:
        advantage = (advantage - advantage[upright].mean()) / (advantage[upright].std() + 1e-8)
    rows = [part[upright] for part in (*inputs, old_log_prob, advantage, returns)]  # [choices, ...]
    for _ in range(epochs):
        if minibatches > 1:
            order = torch.as_tensor(rng.permutation(len(rows[0])))
            rows = [part[order] for part in rows]
        for batch in zip(*(part.tensor_split(minibatches) for part in rows)):
            loss, info = ppo_loss(  # D12: the critic's weight
                *outputs(*batch[:4]), *batch[4:], entropy_coef, 0.5 if ppo else 1.0)
            optimizer.zero_grad()
            loss.backward()
            if ppo:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
    return {f"loss/{level}_{key}": value for key, value in info.items()}


def update(args, networks, optimizers, omega, batch, episode, recent, rng, fall_cost=0.0):
    """Algorithm 1, lines 15-16: the policies on the newest skills, then phi.

    batch: what `rollout` returns. episode: None, or if the agents have just completed one, (obs [N, L, ...]
    where each skill began, final obs [N, ...], skill [N, L]). recent: what phi learns from, of each of the
    last updates (trajectories [n, T, ...], every pair_gap-th state; whether each is a random walk [n]).
    """
    obs, actions, skill, fallen = (part.flatten(0, 1) for part in batch)  # [J * N, ...]
    info, encode = {}, encoder(networks["phi"])
    by_skill = skill < len(omega)  # the other trajectories are random walks
    if by_skill.any():
        obs, actions, skill, fallen = (part[by_skill] for part in (obs, actions, skill, fallen))
        delta = omega[skill]
        with torch.no_grad():
            phi_tau = encode(obs)
        reward = skill_reward(phi_tau[:, :-1], phi_tau[:, 1:], delta[:, None], args.step_floor)
        info["rollout/skill_reward"] = reward.mean()
        fallen = (fallen.cumsum(1) > 0) & (fall_cost > 0)  # from the first fall on, D10
        reward = torch.where(fallen[:, 1:], -fall_cost, reward)
        info |= update_policy(args, "low", networks["pi_low"], networks["v_low"], optimizers["low"],
                              obs[:, :-1], delta, actions, reward, fallen, rng)
    if episode is not None and (episode[2] < len(omega)).any():
        began, final, chosen = (part[episode[2][:, 0] < len(omega)] for part in episode)
        with torch.no_grad():
            returns = high_return(encode(began[:, 0]), encode(final))
        info["rollout/high_return"] = returns.mean()
        rewards = F.pad(returns[:, None], (chosen.shape[1] - 1, 0))  # at the end: the return of all L choices
        never = torch.zeros(len(chosen), chosen.shape[1] + 1, dtype=torch.bool)
        info |= update_policy(args, "high", networks["pi_hi"], networks["v_hi"], optimizers["high"], began,
                              omega.new_empty(len(chosen), 0), chosen[..., None], rewards, never, rng)
    paths, is_walk = (torch.cat(part) for part in zip(*recent))
    loss, terms = tatc_loss(args, encode, paths[is_walk], paths[~is_walk], rng)
    optimizers["phi"].zero_grad()
    loss.backward()
    optimizers["phi"].step()
    return info | {f"loss/{key}": value for key, value in terms.items()}


# ------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def representation(networks, env):
    """phi [S, d] of the ground-truth states."""
    return networks["phi"](torch.as_tensor(env.truth_obs)).numpy()


# --------------------------------------------------------------------------------------------------- training
def load(path, num_envs=1, seed=0):
    """(args, env, networks, omega) of a run directory or checkpoint: phi and the skills, ready to use."""
    checkpoint = gridworld.load_checkpoint(path, ("tatc",))

    def build():
        args, env = gridworld.rebuild(path, checkpoint, Args, lambda name: make_env(name, num_envs, seed))
        gridworld.check_ranges(args, RANGES)
        resolve(args, env)
        networks = make_networks(args, env)
        networks.load_state_dict(checkpoint["networks"])
        return args, env, networks, make_directions(args)

    return gridworld.load_state(path, build)


def train(args):
    torch.set_num_threads(1)  # networks this small run slower on more threads
    env, variant = prepare(args)
    with gridworld.run_directory(args, env, variant, "tatc", () if args.anneal else ("updates",)) \
            as (run_dir, checkpoint), gridworld.stop_requests() as stop:
        torch.manual_seed(args.seed)
        rng = np.random.default_rng(args.seed)
        networks, omega = make_networks(args, env), make_directions(args)
        optimizers = make_optimizers(args, networks)
        # All that changes beside networks, optimisers, environment and random numbers: the checkpoint's rest.
        run = {"update": 0, "seconds": 0.0, "rows": [], "sums": {}, "snapshots": {},
               "random_walk": torch.zeros(args.num_envs, dtype=torch.bool), "began": [], "chosen": [],
               "recent": [], "visits": torch.zeros(env.num_cells, dtype=torch.long),
               "ever": torch.zeros(env.num_cells, dtype=torch.bool)}

        def restore():
            networks.load_state_dict(checkpoint["networks"])
            for name, optimizer in optimizers.items():
                optimizer.load_state_dict(checkpoint["optimizers"][name])
            env.set_state(checkpoint["env"])
            rng.bit_generator.state = checkpoint["rng"]
            gridworld.restore_run(run, checkpoint)

        if checkpoint is not None:
            gridworld.load_state(run_dir, restore)
        recent = deque(run["recent"], maxlen=args.phi_memory)
        gridworld.write_args(args, env, variant, "tatc", run_dir)
        steps_per_update = args.skills_per_update * args.skill_length * args.num_envs
        print(f"{env.name}, {variant}: K {args.episode_length}, c {args.skill_length}, "
              f"p_r {args.reset_prob}, p_rw {args.random_walk_prob}, N {args.num_envs}; "
              f"{args.updates} updates of {steps_per_update} steps")

        def save():
            gridworld.save_checkpoint(run_dir, "tatc", variant, env, args, run | {
                "recent": list(recent), "networks": networks.state_dict(),
                "env": gridworld.as_tensors(env.get_state()), "rng": rng.bit_generator.state,
                "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()}})

        stages = {max(1, round(share * args.updates)) for share in (0.03, 0.08, 0.15, 0.3, 0.6, 1.0)}
        begin = time.perf_counter() - run["seconds"]
        bar = tqdm(range(run["update"] + 1, args.updates + 1), initial=run["update"], total=args.updates,
                   unit="update", dynamic_ncols=True)
        for number in bar:  # Algorithm 1, line 2
            if not run["began"]:
                run["random_walk"] = torch.as_tensor(start_episodes(args, env, rng))  # lines 5-7
            batch = obs, _, skill, _ = rollout(  # lines 8-13
                args, env, networks, omega, run["random_walk"].numpy(), rng)
            run["began"] += obs[:, :, 0].clone()
            run["chosen"] += skill.clone()
            episode = None
            if len(run["began"]) == args.episode_length // args.skill_length:
                episode = torch.stack(run["began"], dim=1), obs[-1, :, -1], torch.stack(run["chosen"], dim=1)
                run["began"], run["chosen"] = [], []
            recent.append((obs[:, :, :: args.pair_gap].flatten(0, 1).clone(),  # D6, D8
                           run["random_walk"].repeat(len(obs))))
            if args.anneal:  # D11
                left = (args.updates + 1 - number) / (args.anneal * args.updates)
                for optimizer in optimizers.values():
                    optimizer.param_groups[0]["lr"] = args.learning_rate * min(1.0, left)
            fall_cost = args.fall_cost if number > FALL_AFTER else 0.0
            info = update(  # lines 15-16
                args, networks, optimizers, omega, batch, episode, recent, rng, fall_cost)

            cells = env.cell(obs[:, :, 1:].flatten(0, 2).numpy())
            run["visits"] += torch.as_tensor(np.bincount(cells, minlength=env.num_cells))
            gridworld.add_to_sums(run["sums"], info | {"rollout/fallen": env.fallen().mean()}, number)
            run["update"], run["seconds"] = number, time.perf_counter() - begin
            if number in stages:
                run["snapshots"][number] = torch.as_tensor(representation(networks, env))
            if number % args.log_every == 0 or number == args.updates:
                row = {"update": number, "env_steps": number * steps_per_update, "seconds": run["seconds"]}
                row |= gridworld.rank_correlation(representation(networks, env), env)
                row |= gridworld.coverage(run, env)
                if not row["eval/extent"] > 0.01:
                    bar.write(f"warning: at update {number} phi has collapsed, "
                              f"its extent is {row['eval/extent']:.3g}")
                gridworld.log_row(args, run, row, run_dir, bar,
                                  ("spearman_all", "spearman_s0", "coverage", "far"))
                run["visits"][:] = 0
            gridworld.save_or_stop(number % args.checkpoint_every == 0 or number == args.updates, stop, save)
        if hasattr(env, "draw_skills"):
            policy = partial(skill_policy, networks["pi_low"], omega, env.action_shape)
            env.draw_skills(run_dir / "skills.png", policy, omega.numpy(), args.skill_length)
        gridworld.write_representation(run_dir, env, representation(networks, env), run, args.env)


if __name__ == "__main__":
    gridworld.guarded(lambda: train(tyro.cli(Args)))

"""TATC: Temporal Abstractions-Augmented Temporally Contrastive Learning (Erraqabi et al., UAI 2022).

    python tatc.py --env umaze

Learns a 2-D representation phi of a maze together with eight directional skills, from one start state. Writes args.json,
metrics.csv, checkpoint.pt, phi.npz, representation.png, progress.png and skills.png to the run directory.

Departures from the paper (evidence in README.md):
D1  Eq. 5 is read as the mean over steps of the squared norm (--boredom selects the other readings).
D2  An update uses N episodes of L skills, as in Algorithm 1; the text's "N trajectories of length c" is --skills-per-update 1,
    the default on the ants.
D3  What the paper leaves open: the critics are separate networks of the policies' shape that also see the time left.
D4  The entropy coefficient of pi_low is 1 on the gridworlds (paper: 0.1, against returns that are sums of c rewards).
D5  On the ants both policies learn by several passes over their data with a clipped ratio (--skill-update a2c is the paper's).
D6  On the ants the pairs of the attractive term and of Eq. 5 are 10 steps apart (--pair-gap 1 is the paper's), and phi sees x, y
    at four times and everything else at a fiftieth of the policies' scale (antmaze.py, phi_scale).
D7  An ant that lies on its back when an episode begins starts at s0.
D8  On the ants phi learns from every 10th state of the last 20 updates' trajectories (--phi-memory 1 is the paper's).
D9  On the ants the length of a step in Eq. 3 has the mean length added (--step-floor 0 is the paper's).
D10 After 1000 updates an ant that falls on its back pays 20 in place of Eq. 3, and pi_low learns nothing from the rest of that skill
    (--fall-cost 0 is the paper's).
D11 On the ants every step size goes linearly to 0 over the second half of the updates (--anneal 0 is the paper's).
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

# The appendix's values per domain. "grid" is for mazes of your own: the paper's rule for K is the distance of the furthest state.
PAPER = {
    "umaze": dict(reset_prob=0.3, random_walk_prob=0.4, episode_length=90, skill_length=30),
    "tmaze": dict(reset_prob=0.2, random_walk_prob=0.4, episode_length=40, skill_length=20),
    "4rooms": dict(reset_prob=0.25, random_walk_prob=0.5, episode_length=60, skill_length=20),
    "grid": dict(reset_prob=0.25, random_walk_prob=0.5, skill_length=20),
    "ant": dict(reset_prob=0.2, random_walk_prob=0.3, episode_length=500, skill_length=100),
}
GRID = dict(boredom_coef=2.0, pair_gap=1, phi_memory=1, high_entropy_coef=0.3, low_entropy_coef=1.0, skill_update="a2c",
            learning_rate=1e-3, anneal=0.0, step_floor=0.0, fall_cost=0.0, updates=7000)
ANT = dict(boredom_coef=5.0, pair_gap=10, phi_memory=20, high_entropy_coef=0.15, low_entropy_coef=0.003, skill_update="clipped",
           learning_rate=1e-3, anneal=0.5, step_floor=1.0, fall_cost=20.0, skills_per_update=1, updates=6000)


@dataclass
class Args:
    env: str = "umaze"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, a maze text file, or ant:FILE for a text maze with the ant"""
    seed: int = 0
    """seed of everything: networks, policies, environment"""
    run_dir: Optional[str] = None
    """where to write; default runs/tatc/<env>/<variant>/seed<seed>"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    updates: Optional[int] = None
    """number of updates (paper: 7000 on the gridworlds, 10000 on the ants); default 7000, ants 6000"""
    prior: Literal["s0", "uniform"] = "s0"
    """s0: an episode starts where the last one ended, or at s0 with probability p_r; uniform: at a uniform free state"""
    beta: float = 0.2
    """beta, weight of the repulsive term, Eq. 2"""
    boredom_coef: Optional[float] = None
    """beta', weight of the boredom term, Eq. 6; 0 is the paper's ablation"""
    boredom: Literal["squared_mean", "mean", "squared_sum", "sum"] = "squared_mean"
    """reading of Eq. 5: mean or sum over the c steps of the squared or plain norm; sum is the literal text"""
    pair_gap: Optional[int] = None
    """steps between the two states of a pair in the attractive term of Eq. 2 and in Eq. 5 (paper: 1)"""
    phi_memory: Optional[int] = None
    """updates whose trajectories phi learns from, the last one included (paper: 1)"""
    step_floor: Optional[float] = None
    """what is added to the length of a step in Eq. 3, in mean lengths (paper: 0)"""
    fall_cost: Optional[float] = None
    """what falling on its back costs an ant in the clipped update (paper: nothing; 0: steps on the back count like others)"""
    fall_after: int = 1000
    """updates before falls cost anything: skills have to be fast first"""
    dim: int = 2
    """d, dimension of phi"""
    num_directions: int = 8
    """number of directions in Omega, on the circle of phi's first two dimensions"""
    reset_prob: Optional[float] = None
    """p_r, probability that an episode starts at s0"""
    random_walk_prob: Optional[float] = None
    """p_rw, probability that an episode is a random walk"""
    episode_length: Optional[int] = None
    """K, steps per episode"""
    skill_length: Optional[int] = None
    """c, steps per skill; L = K / c"""
    num_envs: int = 32
    """N, episodes collected side by side"""
    skills_per_update: Optional[int] = None
    """skills of every episode between two updates: L (Algorithm 1) or 1 (the text)"""
    hidden: int = 128
    """units in each of the two hidden layers"""
    learning_rate: Optional[float] = None
    """RMSprop step size of every network (paper: 1e-3), with the clipped update of phi"""
    anneal: Optional[float] = None
    """share of the updates, the last ones, over which every step size goes linearly to 0 (paper: 0, constant)"""
    high_entropy_coef: Optional[float] = None
    """entropy coefficient of pi_hi"""
    low_entropy_coef: Optional[float] = None
    """entropy coefficient of pi_low (paper: 0.1)"""
    skill_update: Optional[Literal["a2c", "clipped"]] = None
    """how the policies learn: the paper's vanilla A2C, or several passes over the same data with a clipped ratio"""
    clipped_learning_rate: float = 1e-3
    """Adam step size of the clipped update"""
    clipped_passes: int = 4
    """passes of pi_low's clipped update over the batch, in 8 minibatches each; pi_hi takes 8 steps on its whole batch"""
    clipped_gamma: float = 0.95
    """discount of pi_low's clipped update"""
    clipped_lambda: float = 0.9
    """lambda of its generalised advantage estimate; 1 is the Monte-Carlo return"""
    num_threads: int = 1
    """threads of the ant simulator; results do not depend on it"""
    log_every: int = 100
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 500
    """updates between two checkpoints"""
    device: str = "cpu"
    """torch device of the networks"""


# --------------------------------------------------------------------------------------------------------- networks
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


def set_gradients(net, obs, extra, layers, grad):
    """Sets the parameters' gradients of a Net from that by its outputs [n, outputs]: autograd's, in three quarters of the time."""
    one, two, _ = layers
    grad_two = torch.ops.aten.tanh_backward(grad @ net.out.weight, two)
    grad_one = torch.ops.aten.tanh_backward(grad_two @ net.middle.weight, one)
    for layer, inputs, grad in ((net.out, two, grad), (net.middle, one, grad_two)):
        torch.mm(grad.T, inputs, out=layer.weight.grad)
        torch.sum(grad, 0, out=layer.bias.grad)
    torch.sum(grad_one, 0, out=net.bias.grad)
    if obs.is_floating_point():
        torch.mm((obs * net.obs_scale).T, grad_one, out=net.weight_obs.grad)
    else:
        net.weight_obs.grad.zero_().index_add_(0, obs, grad_one)
    if extra is not None:
        torch.mm(extra.T, grad_one, out=net.weight_extra.grad)


def make_env(args):
    """The environment of --env; its module has the drawing functions."""
    if args.env in antmaze.MAZES or args.env.startswith("ant:"):
        return antmaze.make(args.env.removeprefix("ant:"), args.num_envs, args.seed, num_threads=args.num_threads), antmaze
    return gridworld.make(args.env, args.num_envs, args.seed), gridworld


def make_networks(args, env):
    """phi, the two policies, and a critic for each."""
    heads, values = env.action_shape

    def net(extra_size, outputs, scale=env.obs_scale):
        return Net(env.obs_size, extra_size, outputs, args.hidden, scale)

    return nn.ModuleDict(
        {
            "phi": net(0, args.dim, env.phi_scale),
            "pi_hi": net(0, args.num_directions),
            "v_hi": net(1, 1),
            "pi_low": net(args.dim, heads * values),
            "v_low": net(args.dim + 1, 1),
        }
    ).to(args.device)


def flat_parameters(*networks):
    """One vector of which all parameters, and their gradients, become views: a step of the optimiser is then a single call."""
    parameters = [parameter for network in networks for parameter in network.parameters()]
    flat = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    flat.grad, sizes = torch.zeros_like(flat), [parameter.numel() for parameter in parameters]
    for parameter, value, grad in zip(parameters, flat.detach().split(sizes), flat.grad.split(sizes)):
        parameter.data, parameter.grad = value.view_as(parameter), grad.view_as(parameter)
    return flat


def make_optimizers(args, networks):
    """RMSprop for everything; with the clipped update, Adam for each policy and its critic."""
    if args.skill_update == "a2c":
        return {"main": torch.optim.RMSprop(networks.parameters(), lr=args.learning_rate, foreach=True)}
    policies = {level: flat_parameters(networks[f"pi_{level}"], networks[f"v_{level}"]) for level in ("low", "hi")}
    return {"main": torch.optim.RMSprop(networks["phi"].parameters(), lr=args.learning_rate, foreach=True)} | {
        level: torch.optim.Adam([flat], lr=args.clipped_learning_rate, fused=True) for level, flat in policies.items()}


def make_directions(args):
    """Omega [n, d]: (cos(2 k pi / n), sin(2 k pi / n)), zero in any further dimension."""
    angles = 2 * np.pi * np.arange(args.num_directions) / args.num_directions
    omega = np.zeros((args.num_directions, args.dim), dtype=np.float32)
    omega[:, 0], omega[:, 1] = np.cos(angles), np.sin(angles)
    return omega


# ----------------------------------------------------------------------------------------------------------- losses
def contrastive_loss(phi_u, phi_v, phi_x, phi_y, beta):
    """Eq. 2: transitions (u, v) [n, d] of random walks attract, independent pairs (x, y) [m, d] repel."""
    attract = (phi_u - phi_v).square().sum(-1).mean()
    repel = torch.exp(-(phi_x - phi_y).norm(dim=-1)).mean()
    return attract + beta * repel, {"attract": attract.detach(), "repel": repel.detach()}


def skill_reward(phi_s, phi_next, delta, floor=0.0):
    """Eq. 3: cosine [...] between the step phi_s -> phi_next [..., d] and delta [..., d]; 0 where phi does not move.

    D9: `floor` times the batch's mean length is added to the length of the step, so that a small step earns less than a large one.
    """
    step = phi_next - phi_s
    norm = step.norm(dim=-1)
    return torch.where(norm > 0, (step * delta).sum(-1) / (norm + floor * norm.mean()).clamp_min(torch.finfo(norm.dtype).tiny), 0.0)


def high_return(phi_first, phi_final):
    """Eq. 4: the return [n] of each of the L choices of an episode from phi_first to phi_final [n, d]."""
    return (phi_first - phi_final).norm(dim=-1)


def boredom_loss(phi_tau, reading):
    """Eq. 5: length of skill trajectories phi_tau [n, c + 1, d]; D1 is the reading "squared_mean"."""
    step = phi_tau[:, 1:] - phi_tau[:, :-1]
    length = step.square().sum(-1) if reading.startswith("squared") else step.norm(dim=-1)  # [n, c]
    return (length.mean(1) if reading.endswith("mean") else length.sum(1)).mean()


def actor_critic_loss(log_prob, entropy, value, returns, entropy_coef):
    """Vanilla A2C with Monte-Carlo returns, all [n]: policy gradient with a learned baseline, entropy bonus, critic's error."""
    advantage = returns - value.detach()
    policy_loss = -(log_prob * advantage).mean() - entropy_coef * entropy.mean()
    value_loss = (returns - value).square().mean()
    return policy_loss + value_loss, {"policy": policy_loss.detach(), "value": value_loss.detach(), "entropy": entropy.mean().detach()}


# ---------------------------------------------------------------------------------------------------------- rollout
def policy_table(pi_low, omega):
    """Cumulative action probabilities [S, n + 1, 4] of every skill in every gridworld state; the last skill is the random walk."""
    states = torch.arange(len(pi_low.weight_obs), device=omega.device)
    with torch.no_grad():
        probabilities = F.softmax(pi_low(states[:, None], omega[None]), dim=-1).cpu().numpy()  # [S, n, 4]
    walk = np.full_like(probabilities[:, :1], 0.25)
    return np.cumsum(np.concatenate([probabilities, walk], axis=1), axis=-1)


def make_actor(pi_low, omega, action_shape, rng):
    """act(obs [N, ...], skill [N]) -> actions [N, heads], sampled from pi_low; skill n is the random walk.

    In numpy, because a torch call costs more than these few numbers: a table in a gridworld, the same network otherwise.
    """
    if pi_low.obs_scale is None:
        table = policy_table(pi_low, omega)
        return lambda obs, skill: (rng.random((len(obs), 1)) > table[obs, skill, :-1]).sum(-1, keepdims=True)
    weights = {name: value.cpu().numpy() for name, value in pi_low.state_dict().items()}
    weight_obs = weights["obs_scale"][:, None] * weights["weight_obs"]
    first = weights["bias"] + omega.cpu().numpy() @ weights["weight_extra"]  # [n, hidden]
    first = np.concatenate([first, np.zeros_like(first[:1])])
    count = len(omega)
    middle, out = (np.ascontiguousarray(weights[f"{name}.weight"].T) for name in ("middle", "out"))  # products with a view are slower

    def act(obs, skill):
        hidden = np.tanh(np.tanh(obs @ weight_obs + first[skill]) @ middle + weights["middle.bias"])
        logits = (hidden @ out + weights["out.bias"]).reshape(len(obs), *action_shape)
        logits[skill == count] = 0.0
        return (logits - np.log(rng.standard_exponential(logits.shape, dtype=np.float32).clip(1e-30))).argmax(-1)  # Gumbel noise

    return act


def start_episodes(args, env, rng):
    """Algorithm 1, lines 5-7: place the agents; returns which of them [N] walk randomly for this episode."""
    if args.prior == "uniform":
        env.place(np.ones(args.num_envs, dtype=bool), "uniform")
    else:
        reset = rng.random(args.num_envs) < args.reset_prob
        if env.obs_scale is not None:
            reset |= env.flipped()  # D7
        env.place(reset, "s0")
    return rng.random(args.num_envs) < args.random_walk_prob


def rollout(args, env, networks, omega, random_walk, rng):
    """Algorithm 1, lines 8-13: J = skills_per_update skills of c steps of each agent, or random walks of the same length.

    Returns obs [J, c + 1, N, ...], actions [J, c, N, heads] and skills [J, N]; a random walk's skill is the number n.
    """
    skills, steps, heads = args.skills_per_update, args.skill_length, env.action_shape[0]
    obs = np.empty((skills, steps + 1) + env.obs.shape, dtype=env.obs.dtype)
    actions = np.empty((skills, steps, args.num_envs, heads), dtype=np.int64)
    chosen = np.empty((skills, args.num_envs), dtype=np.int64)
    act = make_actor(networks["pi_low"], omega, env.action_shape, rng)
    for j in range(skills):
        with torch.no_grad():
            logits = networks["pi_hi"](torch.as_tensor(env.obs, device=omega.device)).cpu().numpy()
        choice = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)
        chosen[j] = np.where(random_walk, args.num_directions, choice)
        obs[j, 0] = env.obs
        for t in range(steps):
            actions[j, t] = act(env.obs, chosen[j])
            obs[j, t + 1] = env.move(actions[j, t])
    return obs, actions, chosen


# ----------------------------------------------------------------------------------------------------------- update
def encoder(phi):
    """phi as a function of observations [...] -> [..., d]; in a gridworld every state goes through the network once."""
    if phi.obs_scale is not None:
        return phi
    table = phi(torch.arange(len(phi.weight_obs), device=phi.weight_obs.device))
    return lambda states: F.embedding(states, table)


def log_prob_and_entropy(logits, actions):
    """log pi(a|s) and entropy, both [n], of independent heads: logits [n, heads, values], actions [n, heads]."""
    log_pi = F.log_softmax(logits, dim=-1)
    return log_pi.gather(-1, actions[..., None]).squeeze(-1).sum(-1), -(log_pi.exp() * log_pi).sum((-1, -2))


def discounted_returns(rewards, gamma):
    """Monte-Carlo returns [n, c] of rewards [n, c]; no value is bootstrapped at the end of a skill."""
    returns = rewards.clone()
    for t in range(rewards.shape[1] - 2, -1, -1):
        returns[:, t] += gamma * returns[:, t + 1]
    return returns


def low_level_outputs(networks, omega, obs, actions, time_left, skill):
    """log pi_low, its entropy, and V_low, all [n], at obs [n, ...], actions [n, heads], time_left [n], skill [n]."""
    if obs.is_floating_point():
        logits = networks["pi_low"](obs, omega[skill])
    else:  # a (state, skill) pair that was visited many times goes through the network once
        pairs, inverse = torch.unique(obs * len(omega) + skill, return_inverse=True)
        logits = F.embedding(inverse, networks["pi_low"](pairs // len(omega), omega[pairs % len(omega)]))
    log_prob, entropy = log_prob_and_entropy(logits.unflatten(-1, (actions.shape[-1], -1)), actions)
    value = networks["v_low"](obs, torch.cat([omega[skill], time_left[:, None]], dim=-1)).squeeze(-1)
    return log_prob, entropy, value


def high_level_outputs(networks, obs, choice, time_left):
    """log pi_hi, its entropy, and V_hi, all [n], at obs [n, ...] where a skill began, choice [n, 1], time_left [n]."""
    log_prob, entropy = log_prob_and_entropy(networks["pi_hi"](obs)[:, None], choice)
    return log_prob, entropy, networks["v_hi"](obs, time_left[:, None]).squeeze(-1)


def flatten_trajectories(obs, actions):
    """Steps of trajectories, obs [n, steps, ...] and actions [n, steps, heads], as rows, with the share of time left."""
    count, steps = actions.shape[:2]
    time_left = (1 - torch.arange(steps, device=actions.device) / steps).repeat(count)
    return obs.flatten(0, 1), actions.flatten(0, 1), time_left


def clipped_gradient(logits, value, actions, old_log_prob, advantage, returns, entropy_coef):
    """The data-reusing alternative to A2C's loss (D5), with the ratio r = pi(a|s) / pi_old(a|s), A the advantage and R the return:

        L = -mean min(r A, clip(r, 0.8, 1.2) A) - entropy_coef mean H(pi) + 0.5 mean (V - R)^2

    logits [n, heads, values], actions [n, heads], the others [n]. Returns dL/dlogits, dL/dvalue, and the terms of L.
    """
    shifted = logits - logits.amax(-1, keepdim=True)  # by hand, since softmax takes twice the time for so few values
    pi = shifted.exp()
    total = pi.sum(-1, keepdim=True)
    pi, log_pi = pi / total, shifted - total.log()
    entropy = -(pi * log_pi).sum(-1, keepdim=True)  # [n, heads, 1]
    chosen = actions[..., None]
    ratio = (log_pi.gather(-1, chosen).sum((-1, -2)) - old_log_prob).exp()
    gain, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
    slope = (torch.where(gain <= clipped, gain, 0.0) / len(value))[:, None, None]  # of the mean of min(gain, clipped), by log pi
    grad_logits = pi * (slope + entropy_coef / len(value) * (log_pi + entropy))
    grad_logits.scatter_add_(-1, chosen, -slope.expand(chosen.shape))
    error, entropy = value - returns, entropy.sum((-1, -2)).mean()
    policy_loss = -torch.minimum(gain, clipped).mean() - entropy_coef * entropy
    return grad_logits, error / len(value), {"policy": policy_loss, "value": error.square().mean(), "entropy": entropy}


@torch.no_grad()
def clipped_step(policy, critic, optimizer, entropy_coef, obs, policy_extra, critic_extra, actions, *targets):
    """One step of a policy and its critic on obs [n, ...], their extra inputs, and the rest that `clipped_gradient` takes."""
    policy_layers, critic_layers = policy.layers(obs, policy_extra), critic.layers(obs, critic_extra)
    logits = policy_layers[-1].unflatten(-1, (actions.shape[-1], -1))
    grad_logits, grad_value, terms = clipped_gradient(logits, critic_layers[-1].squeeze(-1), actions, *targets, entropy_coef)
    set_gradients(policy, obs, policy_extra, policy_layers, grad_logits.flatten(1))
    set_gradients(critic, obs, critic_extra, critic_layers, grad_value[:, None])
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
    optimizer.step()
    return terms


def normalise(advantage):
    """Mean 0, deviation 1."""
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def clipped_low_update(args, networks, optimizer, omega, rows, rewards, fallen, rng):
    """Clipped update of pi_low with generalised advantages: rows as in `low_level_outputs`, rewards [n, c], fallen [n, c + 1]."""
    with torch.no_grad():
        log_prob, _, value = low_level_outputs(networks, omega, *rows)
    value = value.reshape(rewards.shape)
    following = F.pad(value[:, 1:], (0, 1)) * ~fallen[:, 1:]  # nothing follows the last step of a skill, or a fall
    upright = ~fallen[:, :-1]
    error = (rewards + args.clipped_gamma * following - value) * upright
    advantage = discounted_returns(error, args.clipped_gamma * args.clipped_lambda)
    if upright.sum() < 8:  # fewer than minibatches: nearly all ants lie on their back
        return {}
    obs, actions, time_left, skill = rows
    rows = obs, omega[skill], torch.cat([omega[skill], time_left[:, None]], dim=-1), actions, log_prob
    rows = [part[upright.flatten()] for part in rows] + [normalise(advantage[upright]), (advantage + value)[upright]]
    for _ in range(args.clipped_passes):
        order = torch.as_tensor(rng.permutation(len(rows[0])), device=rewards.device)
        for batch in zip(*(part.index_select(0, order).tensor_split(8) for part in rows)):
            terms = clipped_step(networks["pi_low"], networks["v_low"], optimizer, args.low_entropy_coef, *batch)
    return terms


def clipped_high_update(args, networks, optimizer, rows, returns):
    """Clipped update of pi_hi, 8 steps on all rows, which are as in `high_level_outputs`; returns [n] of Eq. 4."""
    obs, choice, time_left = rows
    with torch.no_grad():
        log_prob, _, value = high_level_outputs(networks, *rows)
    rows = obs, None, time_left[:, None], choice, log_prob, normalise(returns - value), returns
    for _ in range(8):
        terms = clipped_step(networks["pi_hi"], networks["v_hi"], optimizer, args.high_entropy_coef, *rows)
    return terms


def trajectories(recent, walks, device):
    """D_mu (walks) or D_s: trajectories [n, steps, ...] from (obs [J, steps, N, ...], random_walk [N]) of the last updates."""
    parts = [obs[:, :, random_walk == walks].swapaxes(1, 2) for obs, random_walk in recent]
    return torch.as_tensor(np.concatenate([part.reshape((-1,) + part.shape[2:]) for part in parts]), device=device)


def update(args, networks, optimizers, omega, batch, episode, random_walk, recent, rng, fall_cost=0.0):
    """Algorithm 1, lines 15-16. The policies' rewards use phi from before its update, so one backward pass serves all losses.

    batch: obs, actions, skills of `rollout`. episode: (obs [L, N, ...] where each skill began, final obs [N, ...], skills [L, N])
    once the episode is complete, otherwise None. recent: what phi learns from, every pair_gap-th state of the last updates.
    """
    device, (obs, actions, skills) = args.device, batch
    workers = np.flatnonzero(~random_walk)
    loss, info = torch.zeros((), device=device), {}
    encode = encoder(networks["phi"])

    def tensor(array):
        return torch.as_tensor(np.ascontiguousarray(array), device=device)

    walks, skill_paths = trajectories(recent, True, device), trajectories(recent, False, device)
    if len(walks):
        phi_walk = encode(walks)
        phi_u, phi_v = (part.reshape(-1, args.dim) for part in (phi_walk[:, :-1], phi_walk[:, 1:]))
        pairs = tensor(rng.integers(len(phi_u), size=(2, len(phi_u))))
        phi_x, phi_y = F.embedding(pairs, phi_u)
        contrastive, terms = contrastive_loss(phi_u, phi_v, phi_x, phi_y, args.beta)
        loss = loss + contrastive
        info |= {f"loss/{key}": value for key, value in terms.items()}
    if len(skill_paths):
        boredom = boredom_loss(encode(skill_paths), args.boredom)
        loss = loss + args.boredom_coef * boredom  # Eq. 6
        info["loss/boredom"] = boredom.detach()
    if len(workers):
        tau = tensor(obs[:, :, workers].swapaxes(1, 2)).flatten(0, 1)  # [J * workers, c + 1, ...]
        tau_actions = tensor(actions[:, :, workers].swapaxes(1, 2)).flatten(0, 1)
        tau_skill = tensor(skills[:, workers]).flatten()
        with torch.no_grad():
            phi_tau = encode(tau)
        reward = skill_reward(phi_tau[:, :-1], phi_tau[:, 1:], omega[tau_skill][:, None], args.step_floor)
        rows = *flatten_trajectories(tau[:, :-1], tau_actions), tau_skill.repeat_interleave(args.skill_length)
        if args.skill_update == "clipped":
            fallen = torch.zeros(tau.shape[:2], dtype=torch.bool, device=device)
            if fall_cost:  # D10
                fallen = antmaze.on_back(tau).cumsum(1) > 0
            paid = torch.where(fallen[:, 1:], -fall_cost, reward)
            terms = clipped_low_update(args, networks, optimizers["low"], omega, rows, paid, fallen, rng)
        else:
            outputs, returns = low_level_outputs(networks, omega, *rows), discounted_returns(reward, 1.0).reshape(-1)
            low, terms = actor_critic_loss(*outputs, returns, args.low_entropy_coef)
            loss = loss + low
        info |= {f"loss/low_{key}": value for key, value in terms.items()}
        info["rollout/skill_reward"] = reward.mean()
        if episode is not None:
            began, final, choice = episode
            returns = high_return(encode(tensor(began[0, workers])), encode(tensor(final[workers]))).detach()
            returns = returns.repeat_interleave(len(choice))  # the same for all L choices of an episode
            rows = flatten_trajectories(tensor(began[:, workers].swapaxes(0, 1)), tensor(choice[:, workers].T)[..., None])
            if args.skill_update == "clipped":
                terms = clipped_high_update(args, networks, optimizers["hi"], rows, returns)
            else:
                high, terms = actor_critic_loss(*high_level_outputs(networks, *rows), returns, args.high_entropy_coef)
                loss = loss + high
            info |= {f"loss/high_{key}": value for key, value in terms.items()} | {"rollout/high_return": returns.mean()}
    optimizers["main"].zero_grad()
    loss.backward()
    optimizers["main"].step()
    return info


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


@torch.no_grad()
def representation(args, networks, env):
    """phi [S, d] of the ground-truth states."""
    return networks["phi"](torch.as_tensor(env.truth_obs, device=args.device)).cpu().numpy()


def ant_skill_traces(args, networks, omega, starts):
    """xy [n, starts, c + 1, 2] of every skill, run for c steps from the states `starts` [starts, 29] of an ant maze."""
    count = len(omega)
    env = antmaze.make(args.env.removeprefix("ant:"), count * len(starts), 0)
    env.place(np.ones(env.num_envs, dtype=bool), np.tile(starts, (count, 1)))
    act, skill = make_actor(networks["pi_low"], omega, env.action_shape, env.np_random), np.repeat(np.arange(count), len(starts))
    traces = [env.obs[:, :2]]
    for _ in range(args.skill_length):
        traces.append(env.move(act(env.obs, skill))[:, :2])
    return np.stack(traces, axis=1).reshape(count, len(starts), -1, 2)


def ant_scores(args, networks, omega, env, recent, tries=64, steps=1000):
    """What the trained policies of an ant maze can do, without a task.

    skills_travel: share of free positions from which, in the reset pose, some skill ends 3 units away or more after c steps;
    skills_used: number of skills that do so somewhere; skills_travel_on and skills_used_on: the same from states of the ants in the
    last updates, `recent`, one upright state of each 1x1 cell; reaches_end: share of tries in which pi_hi and pi_low come within 4
    units of the far end from s0.
    """

    def travels(starts):  # [n, starts]
        traces = ant_skill_traces(args, networks, omega, starts)
        return np.linalg.norm(traces[:, :, -1] - traces[:, :, 0], axis=-1) >= 3.0

    states = np.concatenate([obs.reshape(-1, env.obs_size) for obs, _ in recent])
    states = np.random.default_rng(0).permutation(states[~antmaze.on_back(states)])
    on = states[np.unique(env.cell(states), return_index=True)[1]]
    rest, on = travels(env.truth_obs), travels(on)
    runner = antmaze.make(args.env.removeprefix("ant:"), tries, 0)
    act = make_actor(networks["pi_low"], omega, runner.action_shape, runner.np_random)
    far_end = env.truth_xy[env.distance[env.start_index].argmax()]
    reached = np.zeros(tries, dtype=bool)
    for t in range(steps):
        if t % args.skill_length == 0:
            with torch.no_grad():
                logits = networks["pi_hi"](torch.as_tensor(runner.obs, device=args.device)).cpu().numpy()
            skill = np.argmax(logits + runner.np_random.gumbel(size=logits.shape), axis=-1)
        runner.move(act(runner.obs, skill))
        reached |= np.linalg.norm(runner.obs[:, :2] - far_end, axis=-1) <= 4.0
    return {"eval/skills_travel": rest.any(0).mean(), "eval/skills_used": int(rest.any(1).sum()),
            "eval/skills_travel_on": on.any(0).mean(), "eval/skills_used_on": int(on.any(1).sum()), "eval/reaches_end": reached.mean()}


# ----------------------------------------------------------------------------------------------- arguments and files
class UsageError(Exception):
    """Something the user asked for that cannot be done; the message names the cause and the fix."""


def resolve(args):
    """The environment, and the arguments with the paper's values for it in place of None."""
    for name in ("num_envs", "dim", "num_directions", "hidden", "clipped_passes", "num_threads", "log_every", "checkpoint_every"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least 1")
    if args.dim < 2:
        raise UsageError(f"--dim is {args.dim}; directional skills need at least 2")
    env, world = make_env(args)
    defaults = PAPER["ant"] | ANT if world is antmaze else PAPER.get(args.env, PAPER["grid"]) | GRID
    if world is antmaze and args.skill_update == "a2c":
        defaults |= dict(low_entropy_coef=0.1, anneal=0.0, step_floor=0.0, fall_cost=0.0)  # the paper's, for the paper's update
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("skill_length", "pair_gap", "phi_memory", "updates"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least 1")
    if args.episode_length is None:
        args.episode_length = int(np.ceil(env.cell_distance.max() / args.skill_length)) * args.skill_length
    if args.episode_length < 1 or args.episode_length % args.skill_length:
        raise UsageError(f"--episode-length is {args.episode_length}; use a positive multiple of --skill-length {args.skill_length}")
    if args.skill_length % args.pair_gap:
        raise UsageError(f"--pair-gap is {args.pair_gap}; use a divisor of --skill-length {args.skill_length}")
    skills = args.episode_length // args.skill_length
    args.skills_per_update = args.skills_per_update or skills
    if args.skills_per_update < 1 or skills % args.skills_per_update:
        raise UsageError(f"--skills-per-update is {args.skills_per_update}; use a divisor of L = {skills}")
    for name in ("reset_prob", "random_walk_prob", "anneal"):
        if not 0 <= getattr(args, name) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a number from 0 to 1")
    for name in ("beta", "boredom_coef", "step_floor", "fall_cost", "learning_rate", "high_entropy_coef", "low_entropy_coef"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a non-negative number")
    if args.fall_cost and (world is gridworld or args.skill_update == "a2c"):
        raise UsageError(f"--fall-cost is {args.fall_cost}; it is for ants and --skill-update clipped, use 0")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {args.device!r} is not usable here; try cpu") from None
    if args.run_dir is None:
        variant = args.prior
        if args.boredom_coef != defaults["boredom_coef"]:
            variant += f"-boredom{args.boredom_coef:g}"
        if args.boredom != "squared_mean":
            variant += f"-{args.boredom}"
        if args.low_entropy_coef != defaults["low_entropy_coef"]:
            variant += f"-entropy{args.low_entropy_coef:g}"
        if args.pair_gap != defaults["pair_gap"]:
            variant += f"-gap{args.pair_gap}"
        if args.phi_memory != defaults["phi_memory"]:
            variant += f"-memory{args.phi_memory}"
        if args.anneal != defaults["anneal"]:
            variant += f"-anneal{args.anneal:g}"
        if args.step_floor != defaults["step_floor"]:
            variant += f"-floor{args.step_floor:g}"
        if args.fall_cost != defaults["fall_cost"]:
            variant += f"-fall{args.fall_cost:g}"
        if args.fall_after != Args.fall_after:
            variant += f"-after{args.fall_after}"
        if args.skill_update != defaults["skill_update"]:
            variant += f"-{args.skill_update}"
        args.run_dir = f"runs/tatc/{Path(args.env).stem}/{variant}/seed{args.seed}"
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
    env, world = resolve(args)
    run_dir = Path(args.run_dir)
    checkpoint_path, metrics_path = run_dir / "checkpoint.pt", run_dir / "metrics.csv"
    if not args.resume and (run_dir / "args.json").exists():
        raise UsageError(f"{run_dir} holds a run already; add --resume to continue it or choose another --run-dir")

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    networks = make_networks(args, env)
    omega = torch.as_tensor(make_directions(args), device=args.device)
    optimizers = make_optimizers(args, networks)
    step_sizes = [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()]
    skills_per_episode = args.episode_length // args.skill_length
    far_cells = env.cell_distance >= np.quantile(env.cell_distance, 0.8)

    done, seconds, sums, rows, snapshots = 0, 0.0, {}, [], {}
    visited = np.zeros(env.num_cells, dtype=bool)
    random_walk, began, choices, recent = None, [], [], []
    free = ("run_dir", "resume", "device", "num_threads") + (() if args.anneal else ("updates",))
    identity = {key: value for key, value in asdict(args).items() if key not in free}
    if args.resume and checkpoint_path.exists():
        checkpoint = load_checkpoint(checkpoint_path)
        other = [f"{key} {old!r} there, {identity.get(key)!r} here"
                 for key, old in checkpoint.get("args", {"env": "unknown"}).items() if identity.get(key) != old]
        if other:
            raise UsageError(f"{checkpoint_path} is of another run ({'; '.join(other)}); use its arguments or another --run-dir")
        try:
            done, seconds, sums = checkpoint["update"], checkpoint["seconds"], checkpoint["sums"]
            networks.load_state_dict(checkpoint["networks"])
            for name, optimizer in optimizers.items():
                optimizer.load_state_dict(checkpoint["optimizers"][name])
            env.set_state(checkpoint["env"])
            rng.bit_generator.state = checkpoint["rng"]
            snapshots = {update: phi.numpy() for update, phi in checkpoint["snapshots"].items()}
            visited, random_walk = checkpoint["visited"].numpy(), checkpoint["random_walk"].numpy()
            began, choices = ([array.numpy() for array in checkpoint[key]] for key in ("began", "choices"))
            recent = [tuple(array.numpy() for array in pair) for pair in checkpoint["recent"]]
        except (KeyError, RuntimeError, ValueError) as error:
            reason = f"is of another version of tatc.py ({type(error).__name__}); use that version or another --run-dir"
            raise UsageError(f"{checkpoint_path} {reason}") from None
        rows = read_rows(metrics_path, done)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_args(args, run_dir)
    print(f"writing to {run_dir}" + (f", continuing after update {done}" if done else ""))

    stages = {max(1, round(share * args.updates)) for share in (0.03, 0.08, 0.15, 0.3, 0.6, 1.0)}
    begin = time.perf_counter() - seconds
    bar = tqdm(range(done + 1, args.updates + 1), initial=done, total=args.updates, unit="update", dynamic_ncols=True)
    for number in bar:
        if not began:
            random_walk = start_episodes(args, env, rng)
        obs, actions, skills = rollout(args, env, networks, omega, random_walk, rng)
        began.extend(obs[:, 0])
        choices.extend(skills)
        complete = len(began) == skills_per_episode
        episode = (np.stack(began), obs[-1, -1], np.stack(choices)) if complete else None
        fall_cost = args.fall_cost if number > args.fall_after else 0.0
        if args.anneal:  # D11
            for optimizer, step_size in zip(optimizers.values(), step_sizes):
                optimizer.param_groups[0]["lr"] = step_size * min(1.0, (args.updates + 1 - number) / (args.anneal * args.updates))
        recent.append((obs[:, :: args.pair_gap].copy(), random_walk))
        info = update(args, networks, optimizers, omega, (obs, actions, skills), episode, random_walk, recent, rng, fall_cost)
        recent = recent[max(0, len(recent) + 1 - args.phi_memory) :]
        if complete:
            began, choices = [], []

        cells = env.cell(obs[:, 1:].reshape((-1,) + obs.shape[3:]))
        visited[cells] = True
        info |= {"eval/far": far_cells[cells].mean(), "rollout/random_walks": random_walk.mean()}
        if world is antmaze:
            info["rollout/flipped"] = env.flipped().mean()
        for key, value in info.items():
            total, count = sums.get(key, (0.0, 0))
            sums[key] = (total + float(value), count + 1)
        if number in stages:
            snapshots[number] = representation(args, networks, env)
        if number % args.log_every == 0 or number == args.updates:
            steps = number * args.skills_per_update * args.skill_length * args.num_envs
            row = {"update": number, "env_steps": steps, "seconds": time.perf_counter() - begin}
            row |= {key: total / count for key, (total, count) in sorted(sums.items())}
            row |= rank_correlation(representation(args, networks, env), env)
            row |= {"eval/coverage": visited.mean(), "rollout/reached": env.cell_distance[visited].max()}
            gradients = [p.grad for group in optimizers["main"].param_groups for p in group["params"] if p.grad is not None]
            row["loss/gradient_norm"] = float(nn.utils.get_total_norm(gradients))
            if world is antmaze:
                row["rollout/diverged"] = env.diverged
                if number == args.updates:
                    row |= ant_scores(args, networks, omega, env, recent or [(obs, random_walk)])  # --phi-memory 1 keeps none
            if not row["eval/extent"] > 0.01:
                bar.write(f"warning: at update {number} phi has collapsed, its extent is {row['eval/extent']:.3g}")
            rows.append({key: str(value) if isinstance(value, int) else format(value, ".6g") for key, value in row.items()})
            write_rows(metrics_path, rows)
            bar.set_postfix({key: format(row[f"eval/{key}"], ".2f") for key in ("spearman_all", "spearman_s0", "coverage", "far")})
            sums, visited[:] = {}, False
        if number % args.checkpoint_every == 0 or number == args.updates:
            checkpoint = {
                "script": "tatc", "args": identity, "update": number, "seconds": time.perf_counter() - begin, "sums": sums,
                "networks": networks.state_dict(), "env": as_tensors(env.get_state()),
                "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
                "rng": rng.bit_generator.state, "snapshots": as_tensors(snapshots), "visited": torch.as_tensor(visited),
                "random_walk": torch.as_tensor(random_walk), "began": [torch.as_tensor(array) for array in began],
                "choices": [torch.as_tensor(array) for array in choices],
                "recent": [tuple(torch.as_tensor(array) for array in pair) for pair in recent],
            }
            write_atomically(checkpoint_path, lambda file: torch.save(checkpoint, file))
    finish(args, env, world, networks, omega, snapshots, rows, run_dir)


def finish(args, env, world, networks, omega, snapshots, rows, run_dir):
    """phi.npz, the pictures, and the last numbers."""
    phi = representation(args, networks, env)
    distance = env.distance[env.start_index]
    arrays = dict(xy=env.truth_xy, phi=phi, distance=distance, start=env.start_index, stages=list(snapshots), snapshots=list(snapshots.values()))
    write_atomically(run_dir / "phi.npz", lambda file: np.savez_compressed(file, **arrays))
    world.draw_representation(run_dir / "representation.png", env, phi)
    world.draw_progress(run_dir / "progress.png", env, list(snapshots.values()), [f"update {update}" for update in snapshots])
    if world is gridworld:
        probabilities = np.diff(policy_table(networks["pi_low"], omega)[:, :-1], axis=-1, prepend=0.0)
        gridworld.draw_skills(run_dir / "skills.png", env, probabilities.swapaxes(0, 1), omega.cpu().numpy())
    else:
        order = np.argsort(distance, kind="stable")[np.linspace(0, len(distance) - 1, 12).astype(int)]
        traces = ant_skill_traces(args, networks, omega, env.truth_obs[order])
        antmaze.draw_traces(run_dir / "skills.png", env, traces, f"{args.skill_length} steps of each skill")
    if rows:
        last = rows[-1]
        print(", ".join(f"{key} {last[key]}" for key in last if key.startswith("eval/") and last[key]))
        rate, minutes = int(last["env_steps"]) / float(last["seconds"]), float(last["seconds"]) / 60
        print(f"{rate:,.0f} environment steps per second, {minutes:.1f} minutes")
    print(f"pictures: {run_dir}/representation.png, progress.png, skills.png")


if __name__ == "__main__":
    try:
        train(tyro.cli(Args))
    except (UsageError, gridworld.MazeError, antmaze.MazeError) as error:
        print(f"tatc.py: {error}", file=sys.stderr)
        sys.exit(2)

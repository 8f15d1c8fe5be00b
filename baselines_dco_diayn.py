"""DCO and DIAYN: the skills that TATC's are compared with (Erraqabi et al., UAI 2022, Section 5.2.3 and Appendix B.2.3).

    python baselines_dco_diayn.py dco --env antmaze1      # deep covering options (Jinnai et al., ICLR 2020), with their DDPG
    python baselines_dco_diayn.py diayn --env antmaze1    # "Diversity is all you need" (Eysenbach et al., ICLR 2019), with its SAC

Both also run on the gridworlds (--env 4rooms). Each writes args.json, metrics.csv, checkpoint.pt and skills.png to the run
directory, DCO also phi.npz (xy, distance, start as everywhere, phi [S, options] = f), DIAYN also replay-<update>.pt for --resume.

checkpoint.pt["skills"] is all that running the skills takes; `skill_actions` and `option_value` below read nothing else:
    method "dco" or "diayn", env, num_skills k, activation "relu", obs_scale [29] (None: a state index, one-hot), and
    kind      "tanh"           out [8] -> torques tanh(out)                                       DCO, ants
              "tanh_gaussian"  out [16] = mean, log std (clipped to -5..2) -> tanh(mean + std * noise)  DIAYN, ants
              "argmax"         out [4] -> the best of four moves                                  DCO, gridworlds
              "softmax"        out [4] -> a move drawn from these logits                          DIAYN, gridworlds
    weights   a list of [k or 1, in, out] and biases of [k or 1, out], one per layer; 1 means shared by all skills (the committed
              checkpoints in results/ hold them in half precision). Skill z:
              x = (obs * obs_scale) @ weights[0][z] + biases[0][z], then for each further layer x = relu(x) @ weights[i][z] + biases[i][z]
    DCO also  f_weights, f_biases: f in the same form, out [1]; threshold [k] and percentile: option z may start where
              f_z(s) > threshold[z] and ends where f_z(s) <= threshold[z]. DIAYN's skills start anywhere and never end.

Sources: f as Wu et al. (ICLR 2019), DDPG as Lillicrap et al. (ICLR 2016), percentile 30 as Jinnai et al. (Table 1), 8 skills and
500,000 transitions each as TATC's appendix, SAC's constants as Eysenbach et al. Departures, and what the papers leave open:
B1  DDPG learns from the fixed random-walk dataset alone, as TATC's appendix says, so its exploration noise has no use here.
B2  The option's reward f(s) - f(s') is divided by its standard deviation over the dataset: f changes little in one step, and a
    factor leaves the best policy as it is.
B3  The sign of an eigenvector is arbitrary too: each f keeps the one that its initial weights lead to.
B4  The value that DDPG learns does not stop where the option ends. With --end-cuts-value it does; then leaving for the end gains
    only what the discount takes from waiting, and Q, once overestimated, forgets as slowly: on 4-rooms after 3000 updates no state
    reached the end with it, all did without (one seed each, of other batch size and tau; with gamma 0.95 nearly all did with it too).
B5  On the gridworlds DDPG's actor is the argmax of a Q-network with four outputs (Q-learning on the same dataset), and SAC's
    expectations over the four moves are exact.
B6  SAC has two critics and no value network (Haarnoja et al. 2018b); DIAYN's authors used its first version.
B7  N agents step together, then --updates-per-step gradient steps follow (the authors: one per environment step), because N = 32
    would be 3 million of them. Two suffice on AntMaze-1: the discriminator is right in 99 % of the states after 130,000 of 3 million
    steps. Episodes of different agents end at different times, all at s0 again: no ant stays on its back.
B8  On the ants f sees x, y at four times and the rest at a fiftieth of the policies' scale, as TATC's phi and Lap-rep's do (antmaze.py).
B9  Random walks use the ants' 5 torque values, as TATC's and Lap-rep's do; the options' and skills' own torques are continuous.
"""

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Optional, Tuple, Union

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; its threads slow small products down
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import antmaze
import gridworld

DCO_GRID = dict(f_updates=3000, f_batch_size=1024, policy_updates=5000, batch_size=512, tau=0.01, hidden=(64, 64), skill_length=100)
DCO_ANT = dict(f_updates=30000, f_batch_size=128, policy_updates=50000, batch_size=64, tau=0.001, hidden=(400, 300), skill_length=200)
DIAYN_GRID = dict(updates=20000, updates_per_step=1, hidden=(128, 128), skill_length=30)
DIAYN_ANT = dict(updates=94000, updates_per_step=2, hidden=(300, 300), skill_length=200, episode_length=1000)
EPISODE = {"umaze": 90, "tmaze": 40, "4rooms": 60}  # TATC's K


@dataclass
class DCO:
    """Deep covering options: each option leads down the second eigenvector of its own random walks."""

    env: str = "antmaze1"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, a maze text file, or ant:FILE for a text maze with the ant"""
    seed: int = 0
    """seed of everything: networks, data, environment"""
    run_dir: Optional[str] = None
    """where to write; default runs/dco/<env>/uniform/seed<seed>"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    num_skills: int = 8
    """number of options"""
    samples: int = 500_000
    """random-walk transitions from uniform starts of each option"""
    episode_length: int = 50
    """steps per random walk"""
    f_updates: Optional[int] = None
    """updates of each f (Wu: 30000); 3000 on the gridworlds"""
    f_batch_size: Optional[int] = None
    """pairs per update of f (Wu: 128); 1024 on the gridworlds"""
    f_beta: float = 0.25
    """weight of the orthonormality penalty (Wu: 5 / d at d = 20)"""
    f_discount: float = 0.9
    """v follows u by 1 + geometric(discount) steps"""
    f_hidden: int = 256
    """units in each of f's three hidden layers"""
    f_learning_rate: float = 1e-3
    """Adam step size of f"""
    percentile: float = 30.0
    """an option ends where f is at most this percentile of f over its data, and starts elsewhere"""
    policy_updates: Optional[int] = None
    """DDPG updates of each option"""
    batch_size: Optional[int] = None
    """transitions per DDPG update (DDPG: 64); 512 on the gridworlds"""
    end_cuts_value: bool = False
    """no value after the option's end, in learning too; default: only the execution ends there (B4)"""
    gamma: float = 0.99
    """discount of the options"""
    tau: Optional[float] = None
    """step of the target networks (DDPG: 0.001); 0.01 on the gridworlds"""
    actor_learning_rate: float = 1e-4
    """Adam step size of the actor"""
    critic_learning_rate: float = 1e-3
    """Adam step size of the critic"""
    hidden: Optional[Tuple[int, ...]] = None
    """units of the actor's and the critic's hidden layers (DDPG: 400 300); 64 64 on the gridworlds"""
    skill_length: Optional[int] = None
    """steps of an option in the scores and the picture"""
    num_envs: int = 32
    """N, agents side by side"""
    num_threads: int = 1
    """threads of the ant simulator; results do not depend on it"""
    log_every: int = 1000
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 10_000
    """updates between two checkpoints"""
    device: str = "cpu"
    """torch device of the networks"""


@dataclass
class DIAYN:
    """Diversity is all you need: skills that a discriminator can tell apart by the states they visit."""

    env: str = "antmaze1"
    """umaze, tmaze, 4rooms, antmaze1, antmaze2, a maze text file, or ant:FILE for a text maze with the ant"""
    seed: int = 0
    """seed of everything: networks, skills, environment"""
    run_dir: Optional[str] = None
    """where to write; default runs/diayn/<env>/<prior>/seed<seed>"""
    resume: bool = False
    """continue the run in the run directory, or start it if there is none"""
    num_skills: int = 8
    """number of skills z"""
    updates: Optional[int] = None
    """number of steps of all N agents together, each followed by the gradient steps; N * updates environment steps"""
    updates_per_step: Optional[int] = None
    """gradient steps after each step of all N agents"""
    prior: Literal["s0", "uniform"] = "s0"
    """where episodes start"""
    episode_length: Optional[int] = None
    """steps per episode, one skill each (ants: 1000 as the authors; gridworlds: TATC's K)"""
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
    hidden: Optional[Tuple[int, ...]] = None
    """units of every network's hidden layers (300 300); 128 128 on the gridworlds"""
    skill_length: Optional[int] = None
    """steps of a skill in the picture"""
    num_envs: int = 32
    """N, agents side by side"""
    num_threads: int = 1
    """threads of the ant simulator; results do not depend on it"""
    log_every: int = 500
    """updates between two rows of metrics.csv"""
    checkpoint_every: int = 5000
    """updates between two checkpoints"""
    device: str = "cpu"
    """torch device of the networks"""


Args = Union[Annotated[DCO, tyro.conf.subcommand("dco")], Annotated[DIAYN, tyro.conf.subcommand("diayn")]]


# --------------------------------------------------------------------------------------------------------- networks
class MLP(nn.Module):
    """ReLU layers on the concatenation of obs and extra; obs is float [..., obs_size], scaled by fixed constants, or a state index."""

    def __init__(self, obs_size, extra_size, hidden, outputs, obs_scale=None):
        super().__init__()
        bound = (obs_size + extra_size) ** -0.5  # torch's own default for a linear layer
        self.weight_obs = nn.Parameter(torch.empty(obs_size, hidden[0]).uniform_(-bound, bound))
        self.weight_extra = nn.Parameter(torch.empty(extra_size, hidden[0]).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(hidden[0]).uniform_(-bound, bound))
        self.register_buffer("obs_scale", None if obs_scale is None else torch.tensor(obs_scale))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(hidden, [*hidden[1:], outputs]))

    def forward(self, obs, extra=None):
        if obs.is_floating_point():
            x = torch.addmm(self.bias, obs * self.obs_scale, self.weight_obs)
        else:
            x = F.embedding(obs, self.weight_obs) + self.bias
        if extra is not None:
            x = torch.addmm(x, extra, self.weight_extra)
        for layer in self.layers:
            x = layer(F.relu(x))
        return x


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


def encoder(phi):
    """phi as a function of observations [...] -> [..., d]; in a gridworld every state goes through the network once."""
    if phi.obs_scale is not None:
        return phi
    table = phi(torch.arange(len(phi.weight_obs), device=phi.weight_obs.device))
    return lambda states: F.embedding(states, table)


def polyak(target, online, tau):
    """target <- (1 - tau) target + tau online, parameter by parameter."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


# ----------------------------------------------------------------------------------------- skills, from a checkpoint
def stacked_layers(weight_obs, bias, linears):
    """Weights and biases of a network as the checkpoint holds them: lists of [1, in, out] and [skills or 1, out]."""
    weights = [weight_obs[None]] + [linear.weight.T[None] for linear in linears]
    biases = [bias.reshape(-1, bias.shape[-1])] + [linear.bias[None] for linear in linears]
    return [w.detach().cpu().clone() for w in weights], [b.detach().cpu().clone() for b in biases]


def stacked_output(weights, biases, obs, z):
    """Output [n, out] of the network of skill z at obs [n, in], already scaled, or state indices [n]."""
    for i, (weight, bias) in enumerate(zip(weights, biases)):
        weight, bias = weight[z % len(weight)].float(), bias[z % len(bias)].float()  # a single one is shared
        if i == 0:
            x = obs @ weight + bias if obs.is_floating_point() else weight[obs] + bias
        else:
            x = F.relu(x) @ weight + bias
    return x


def scaled(skills, obs):
    """What the networks of a checkpoint's entry "skills" take for observations [n, ...]."""
    obs = torch.as_tensor(obs)
    return obs if skills["obs_scale"] is None else obs * skills["obs_scale"]


def skill_actions(skills, obs, skill, rng):
    """What env.move takes: actions of `skill` [n] at obs [n, ...], by the checkpoint's entry "skills" alone."""
    obs, outputs = scaled(skills, obs), None
    for z in np.unique(skill):
        mine = torch.as_tensor(skill == z)
        output = stacked_output(skills["weights"], skills["biases"], obs[mine], z)
        outputs = output.new_empty(len(obs), output.shape[-1]) if outputs is None else outputs
        outputs[mine] = output
    outputs = outputs.numpy()
    if skills["kind"] == "tanh_gaussian":
        mean, log_std = np.split(outputs, 2, axis=-1)
        outputs = mean + np.exp(log_std.clip(-5, 2)) * rng.standard_normal(mean.shape, dtype=np.float32)
    elif skills["kind"] == "softmax":
        outputs = outputs + rng.gumbel(size=outputs.shape)
    return np.tanh(outputs) if skills["kind"].startswith("tanh") else outputs.argmax(-1)


def option_value(skills, obs, z):
    """f_z [n] at obs [n, ...]; the option has ended where it is at most threshold[z]."""
    return stacked_output(skills["f_weights"], skills["f_biases"], scaled(skills, obs), z).squeeze(-1)


def skill_traces(args, skills, which, starts, world):
    """xy [skills, starts, T + 1, 2] of the skills `which` from the states `starts` [m, ...], and who ended, [skills, starts, 2].

    The last axis of the second: ended at the start already, ended within T steps. An option that ended stands still.
    """
    env, _ = make_env(replace(args, num_envs=len(which) * len(starts), seed=0))
    env.place(np.ones(env.num_envs, dtype=bool), np.concatenate([starts] * len(which)))
    skill, rng = np.repeat(which, len(starts)), np.random.default_rng(0)

    def finished():
        if skills["method"] == "diayn":
            return np.zeros(env.num_envs, dtype=bool)
        return np.concatenate([(option_value(skills, obs, z) <= skills["threshold"][z]).numpy()
                               for z, obs in zip(which, np.split(env.obs, len(which)))])

    def position():
        return env.truth_xy[env.obs] if world is gridworld else env.obs[:, :2]

    ended = begun_ended = finished()
    traces = [position()]
    for _ in range(args.skill_length):
        env.move(skill_actions(skills, env.obs, skill, rng))
        traces.append(np.where(ended[:, None], traces[-1], position()))
        ended = ended | finished()
    shape = (len(which), len(starts))
    return np.stack(traces, axis=1).reshape(*shape, -1, 2), np.stack([begun_ended, ended], axis=-1).reshape(*shape, 2)


def draw_panels(path, env, world, values, traces, titles):
    """One maze per skill: values [skills, S] of the free states as colours, and traces [skills, starts, T, 2]."""
    columns = -(-len(values) // 2)
    figure = Figure(figsize=(3 * columns, 6.4), layout="constrained")
    for ax, value, paths, title in zip(figure.subplots(2, columns, squeeze=False).ravel(), values, traces, titles):
        if world is gridworld:
            gridworld.draw_maze(ax, env, value)
        else:
            antmaze.draw_maze(ax, env)
            ax.scatter(*env.truth_xy.T, c=value, s=10, cmap="viridis")
        for xy in paths:
            ax.plot(*xy.T, color="tab:orange", lw=1)
            ax.plot(*xy[-1], "o", color="tab:orange", ms=3)
        ax.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)


# ============================================================================================= DCO: data, f, and DDPG
def sample_pairs(data, count, discount, rng):
    """(u, v), each [count, ...], from episodes data [E, K + 1, ...]: v follows u by 1 + geometric steps, cut at the episode's end."""
    episode, first = rng.integers(len(data), size=count), rng.integers(data.shape[1] - 1, size=count)
    left = data.shape[1] - 1 - first  # the gap is at most this
    gap = np.ones(count, dtype=np.int64)
    if discount > 0:
        gap += (np.log1p(-rng.random(count) * (1 - discount**left)) / np.log(discount)).astype(np.int64)
    return data[episode, first], data[episode, first + np.minimum(gap, left)]


def collect_walks(args, env, rng):
    """--samples random-walk steps from uniform starts, rounded up to whole episodes: obs [E, K + 1, ...] and action indices [E, K, heads]."""
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
            if env.obs_scale is not None:
                whole[i] &= ~env.last_diverged  # such an ant jumped to s0
    return obs.swapaxes(1, 2)[whole], actions.swapaxes(1, 2)[whole]


def fiedler_loss(f_u, f_v, beta):
    """Jinnai et al.'s objective: Lap-rep's (TATC's Eq. 1) with phi = (1, f); f_u, f_v [n] of n independent pairs (u, v).

    With the first coordinate constant, ||E[phi phi^T] - I||^2 = 2 E[f]^2 + E[f^2 - 1]^2, and the square of a mean over states is
    the mean over pairs x != y of the product: ((sum_k g_k)^2 - sum_k g_k^2) / (n (n - 1)), unbiased.
    """
    count = len(f_u)
    attract = (f_u - f_v).square().mean()
    terms = torch.stack([f_u, f_u.square() - 1])  # [2, n]
    mean, variance = (terms.sum(1).square() - terms.square().sum(1)) / (count * (count - 1))
    return attract + beta * (2 * mean + variance), {"attract": attract.detach(), "mean": mean.detach(), "variance": variance.detach()}


def fiedler_cosine(f, env):
    """|cosine| of f [S] with the exact second eigenvector of a gridworld (with its eigenspace, should it be repeated)."""
    values, vectors = env.laplacian_eigenvectors(min(4, env.num_states))
    space = vectors[:, np.abs(values - values[1]) < 1e-6 * values[1]]
    return np.linalg.norm(space.T @ f) / max(np.linalg.norm(f), 1e-12)


def temporal_difference_loss(q, reward, done, next_value, gamma):
    """Squared error of q [n] against r + gamma Q'(s', mu'(s')), Q' = 0 where done; all [n]."""
    return (q - (reward + gamma * (1 - done) * next_value)).square().mean()


def make_dco(args, env):
    """f, the critic and on the ants the actor of one option, the target networks, and the optimisers."""
    heads, values = env.action_shape
    ant = env.obs_scale is not None
    networks = {"f": Phi(env.obs_size, 1, args.f_hidden, env.phi_scale),
                "critic": MLP(env.obs_size, heads if ant else 0, args.hidden, 1 if ant else values, env.obs_scale)}
    if ant:
        networks["actor"] = MLP(env.obs_size, 0, args.hidden, heads, env.obs_scale)
    networks = nn.ModuleDict(networks).to(args.device)
    targets = nn.ModuleDict({name: MLP(env.obs_size, len(net.weight_extra), args.hidden, net.layers[-1].out_features, env.obs_scale)
                             for name, net in networks.items() if name != "f"}).to(args.device)
    for name, target in targets.items():
        target.load_state_dict(networks[name].state_dict())
    rates = {"f": args.f_learning_rate, "critic": args.critic_learning_rate, "actor": args.actor_learning_rate}
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=rates[name], fused=True) for name, net in networks.items()}
    return networks, targets, optimizers


def update_f(args, f, optimizer, walks, rng):
    """One step of f on --f-batch-size pairs of its random walks [E, K + 1, ...]."""
    pairs = torch.as_tensor(np.stack(sample_pairs(walks, args.f_batch_size, args.f_discount, rng)), device=args.device)
    f_u, f_v = encoder(f)(pairs).squeeze(-1)
    loss, info = fiedler_loss(f_u, f_v, args.f_beta)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {f"loss/f_{key}": value for key, value in info.items()}


@torch.no_grad()
def option_dataset(args, f, walks, actions):
    """The option of f: its threshold, and (obs [n, ...], actions [n, heads], rewards [n], done [n], next_obs [n, ...]).

    The n transitions are all, or with --end-cuts-value those from states where the option runs.
    """
    flat = torch.as_tensor(walks, device=args.device).flatten(0, 1)
    values = torch.cat([encoder(f)(part) for part in flat.split(50_000)]).reshape(walks.shape[:2]).cpu().numpy()  # [E, K + 1]
    threshold = np.float32(np.percentile(values, args.percentile))
    running = values[:, :-1] > threshold if args.end_cuts_value else np.ones(actions.shape[:2], dtype=bool)
    rewards = (values[:, :-1] - values[:, 1:])[running]
    rewards /= max(rewards.std(), 1e-8)  # B2
    done = (args.end_cuts_value * (values[:, 1:] <= threshold))[running].astype(np.float32)
    actions = actions[running]
    if walks.dtype == np.float32:
        actions = actions.astype(np.float32) / 2 - 1  # the torque of each index
    return threshold, (walks[:, :-1][running], actions, rewards, done, walks[:, 1:][running])


def update_option(args, networks, targets, optimizers, dataset, rng):
    """One step of DDPG (Lillicrap et al., Algorithm 1) on the ants, of Q-learning on the gridworlds (B5)."""
    index = rng.integers(len(dataset[0]), size=args.batch_size)
    obs, actions, reward, done, next_obs = (torch.as_tensor(part[index], device=args.device) for part in dataset)
    with torch.no_grad():
        if "actor" in networks:
            next_value = targets["critic"](next_obs, torch.tanh(targets["actor"](next_obs))).squeeze(-1)
        else:
            next_value = targets["critic"](next_obs).amax(-1)
    if "actor" in networks:
        q = networks["critic"](obs, actions).squeeze(-1)
    else:
        q = networks["critic"](obs).gather(-1, actions.long()).squeeze(-1)
    loss = temporal_difference_loss(q, reward, done, next_value, args.gamma)
    optimizers["critic"].zero_grad()
    loss.backward()
    optimizers["critic"].step()
    info = {"loss/critic": loss.detach(), "rollout/q": q.detach().mean()}
    if "actor" in networks:
        actor_loss = -networks["critic"](obs, torch.tanh(networks["actor"](obs))).mean()
        optimizers["actor"].zero_grad()
        actor_loss.backward(inputs=list(networks["actor"].parameters()))
        optimizers["actor"].step()
    for name, target in targets.items():
        polyak(target, networks[name], args.tau)
    return info


def add_option(skills, args, env, networks, threshold):
    """The checkpoint's entry "skills" with one more option."""
    policy, f = networks["actor" if "actor" in networks else "critic"], networks["f"]
    weights, biases = stacked_layers(policy.weight_obs, policy.bias, policy.layers)
    scale = 1.0 if f.obs_scale is None else (f.obs_scale / policy.obs_scale)[:, None]  # the checkpoint has one obs_scale
    f_weights, f_biases = stacked_layers(f.weight_obs * scale, f.bias, [f.second, f.third, f.out])
    new = {"weights": weights, "biases": biases, "f_weights": f_weights, "f_biases": f_biases, "threshold": torch.tensor([threshold])}
    if skills is not None:
        new = {key: torch.cat([skills[key], value]) if key == "threshold" else [torch.cat(pair) for pair in zip(skills[key], value)]
               for key, value in new.items()}
    return describe_skills(args, env, "dco", "tanh" if "actor" in networks else "argmax") | new | {
        "num_skills": len(new["threshold"]), "percentile": args.percentile}


def describe_skills(args, env, method, kind):
    """The part of the checkpoint's entry "skills" that needs no network."""
    scale = None if env.obs_scale is None else torch.as_tensor(env.obs_scale)
    return {"method": method, "env": args.env, "num_skills": args.num_skills, "kind": kind, "activation": "relu", "obs_scale": scale}


def train_dco(args):
    env, world, run_dir, checkpoint, identity = begin_run(args, "dco", ())
    done, seconds, sums, rows, skills = 0, 0.0, {}, [], None
    if checkpoint is not None:
        done, seconds, sums, skills = (checkpoint[key] for key in ("update", "seconds", "sums", "skills"))
        rows = read_rows(run_dir / "metrics.csv", done)
    per_option = args.f_updates + args.policy_updates
    total = args.num_skills * per_option
    begin = time.perf_counter() - seconds
    bar = tqdm(initial=done, total=total, unit="update", dynamic_ncols=True)
    for option in range(done // per_option, args.num_skills):
        # Data, networks and their random numbers belong to the option: --resume makes the data again from its seed.
        seed = args.seed * args.num_skills + option
        walker, _ = make_env(replace(args, seed=seed))
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        networks, targets, optimizers = make_dco(args, env)
        bar.set_description(f"option {option}: data")
        walks, actions = collect_walks(args, walker, rng)
        threshold, dataset = None, None
        if checkpoint is not None and done % per_option:
            load_networks(checkpoint, networks, targets, optimizers)
            rng.bit_generator.state = checkpoint["rng"]
        checkpoint = None
        for number in range(done + 1, (option + 1) * per_option + 1):
            stage = (number - 1) % per_option + 1
            if stage <= args.f_updates:
                info = update_f(args, networks["f"], optimizers["f"], walks, rng)
            else:
                if dataset is None:
                    threshold, dataset = option_dataset(args, networks["f"], walks, actions)
                info = update_option(args, networks, targets, optimizers, dataset, rng)
            add_to_sums(sums, info)
            if number == (option + 1) * per_option:
                skills = add_option(skills, args, env, networks, threshold)
            if number % args.log_every == 0 or stage in (args.f_updates, per_option):
                row = {"update": number, "env_steps": (option + 1) * walks.shape[0] * args.episode_length,
                       "seconds": time.perf_counter() - begin, "rollout/option": option}
                row |= {key: total / count for key, (total, count) in sorted(sums.items())}
                with torch.no_grad():
                    f = networks["f"](torch.as_tensor(env.truth_obs, device=args.device)).squeeze(-1).cpu().numpy()
                row["eval/f_extent"] = f.max() - f.min()
                if world is gridworld:
                    row["eval/fiedler_cosine"] = fiedler_cosine(f, env)
                if stage == per_option:
                    _, ended = skill_traces(args, skills, [option], env.truth_obs, world)
                    row |= {"eval/initiation": 1 - ended[..., 0].mean(), "eval/reaches": ended[~ended[..., 0], 1].mean()}
                sums = {}
                log_row(rows, row, run_dir, bar, ("f_extent", "fiedler_cosine", "reaches"))
            bar.set_description(f"option {option}: {'f' if stage <= args.f_updates else 'policy'}", refresh=False)
            bar.update()
            if number % args.checkpoint_every == 0 or stage == per_option:
                state = {"script": "dco", "args": identity, "update": number, "seconds": time.perf_counter() - begin,
                         "sums": sums, "skills": skills, "rng": rng.bit_generator.state}
                if stage < per_option:
                    state |= networks_state(networks, targets, optimizers)
                write_atomically(run_dir / "checkpoint.pt", lambda file: torch.save(state, file))
        done = (option + 1) * per_option
    bar.close()
    finish_dco(args, env, world, skills, rows, run_dir)


def finish_dco(args, env, world, skills, rows, run_dir):
    """phi.npz, the picture, and the last numbers."""
    f = np.stack([option_value(skills, env.truth_obs, z).numpy() for z in range(args.num_skills)])  # [options, S]
    distance = env.distance[env.start_index]
    arrays = dict(xy=env.truth_xy, phi=f.T, distance=distance, start=env.start_index, threshold=skills["threshold"].numpy())
    write_atomically(run_dir / "phi.npz", lambda file: np.savez_compressed(file, **arrays))
    starts = env.truth_obs[np.argsort(distance, kind="stable")[np.linspace(0, len(distance) - 1, 12).astype(int)]]
    traces, _ = skill_traces(args, skills, list(range(args.num_skills)), starts, world)
    titles = [f"option {z}: ends where f <= {threshold:.2f}" for z, threshold in enumerate(skills["threshold"])]
    draw_panels(run_dir / "skills.png", env, world, f, traces, titles)
    for key in ("eval/fiedler_cosine", "eval/reaches"):
        values = [float(row[key]) for row in rows if row.get(key) and row.get("eval/reaches")]
        if values:
            print(f"{key} of the {len(values)} options: " + " ".join(f"{value:.3f}" for value in values))
    print(f"{float(rows[-1]['seconds']) / 60:.1f} minutes; picture: {run_dir}/skills.png")


# ===================================================================================== DIAYN: SAC and a discriminator
class Replay:
    """The newest transitions as rows of one float32 array: obs, action, next obs, skill. Small integers are exact in float32."""

    def __init__(self, size, obs_width, action_width):
        self.rows = np.zeros((size, 2 * obs_width + action_width + 1), dtype=np.float32)
        self.splits = np.cumsum([obs_width, action_width, obs_width])
        self.position, self.filled = 0, 0

    def add(self, *columns):
        """Columns [n, ...] in the rows' order."""
        rows = np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1)
        self.rows[(self.position + np.arange(len(rows))) % len(self.rows)] = rows
        self.position = (self.position + len(rows)) % len(self.rows)
        self.filled = min(self.filled + len(rows), len(self.rows))

    def sample(self, shape, rng):
        """Independent rows, as tensors [*shape, width] of obs, action, next obs and skill."""
        return torch.as_tensor(self.rows[rng.integers(self.filled, size=shape)]).tensor_split(self.splits.tolist(), dim=-1)


def make_diayn(args, env):
    """Policy, two critics and the discriminator, the target critics, and the optimisers."""
    heads, values = env.action_shape
    skills, ant = args.num_skills, env.obs_scale is not None
    policy = MLP(env.obs_size, skills, args.hidden, 2 * heads if ant else values, env.obs_scale)
    discriminator = MLP(env.obs_size, 0, args.hidden, skills, env.obs_scale)
    critics = [MLP(env.obs_size, skills + (heads if ant else 0), args.hidden, 1 if ant else values, env.obs_scale) for _ in range(4)]
    networks = nn.ModuleDict({"policy": policy, "q1": critics[0], "q2": critics[1], "discriminator": discriminator}).to(args.device)
    targets = nn.ModuleDict({"q1": critics[2], "q2": critics[3]}).to(args.device)
    for name, target in targets.items():
        target.load_state_dict(networks[name].state_dict())
    parameters = {"policy": policy.parameters(), "critics": [*critics[0].parameters(), *critics[1].parameters()],
                  "discriminator": discriminator.parameters()}
    optimizers = {name: torch.optim.Adam(group, lr=args.learning_rate, fused=True) for name, group in parameters.items()}
    return networks, targets, optimizers


def squashed_gaussian(outputs, noise):
    """Torques tanh(mean + std * noise) [n, m] and their log density [n]; outputs [n, 2 m] of the policy, noise [n, m]."""
    mean, log_std = outputs.chunk(2, dim=-1)
    log_std = log_std.clamp(-5, 2)
    raw = mean + log_std.exp() * noise
    log_normal = -0.5 * noise.square() - log_std - 0.5 * np.log(2 * np.pi)
    log_slope = 2 * (np.log(2) - raw - F.softplus(-2 * raw))  # log(1 - tanh^2), without cancellation
    return torch.tanh(raw), (log_normal - log_slope).sum(-1)


def value_and_log_prob(policy, critics, obs, code, noise):
    """min Q [n] and log pi [n] at obs [n, ...], code [n, skills]: at one sampled action, or without noise their exact mean (B5)."""
    outputs = policy(obs, code)
    if noise is None:
        log_pi = F.log_softmax(outputs, dim=-1)
        q = torch.minimum(critics["q1"](obs, code), critics["q2"](obs, code))
        return (log_pi.exp() * q).sum(-1), (log_pi.exp() * log_pi).sum(-1)
    action, log_prob = squashed_gaussian(outputs, noise)
    extra = torch.cat([code, action], dim=-1)
    return torch.minimum(critics["q1"](obs, extra), critics["q2"](obs, extra)).squeeze(-1), log_prob


def skill_reward_diayn(logits, skill):
    """DIAYN's reward: log q(z|s') - log p(z) [n], p uniform; logits [n, skills] of the discriminator at s', skill [n]."""
    return -F.cross_entropy(logits, skill, reduction="none") + np.log(logits.shape[-1])


def update_sac(args, networks, targets, optimizers, obs, action, next_obs, reward, code, noise):
    """One step of SAC: critics, policy, target critics; action [n, m] torques or [n, 1] moves, noise [2, n, m] or (None, None)."""
    with torch.no_grad():
        next_q, next_log_prob = value_and_log_prob(networks["policy"], targets, next_obs, code, noise[0])
        target = reward + args.gamma * (next_q - args.alpha * next_log_prob)  # episodes are cut, never terminal
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
    policy_loss.backward(inputs=list(networks["policy"].parameters()))  # the critics' own gradients are not needed
    optimizers["policy"].step()
    for name, critic in targets.items():
        polyak(critic, networks[name], args.tau)
    return {"loss/critic": critic_loss.detach(), "loss/policy": policy_loss.detach(), "rollout/entropy": -log_prob.detach().mean()}


def update_discriminator(discriminator, optimizer, next_obs, skill):
    """One step of q(z|s') by maximum likelihood; returns the skills' reward [n], from before it."""
    logits = discriminator(next_obs)
    loss = F.cross_entropy(logits, skill)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return skill_reward_diayn(logits.detach(), skill), {"loss/discriminator": loss.detach()}


def update(args, networks, targets, optimizers, replay, discrete, rng):
    """--updates-per-step gradient steps of the discriminator and of SAC."""
    shape = (args.updates_per_step, args.batch_size)
    obs, action, next_obs, skill = (part.to(args.device) for part in replay.sample(shape, rng))
    if discrete:
        obs, next_obs = obs.squeeze(-1).long(), next_obs.squeeze(-1).long()
        noise = [(None, None)] * args.updates_per_step
    else:
        noise = torch.as_tensor(rng.standard_normal((shape[0], 2, *action.shape[1:]), dtype=np.float32), device=args.device)
    skill = skill.squeeze(-1).long()
    code = F.one_hot(skill, args.num_skills).float()
    for i in range(args.updates_per_step):
        reward, info = update_discriminator(networks["discriminator"], optimizers["discriminator"], next_obs[i], skill[i])
        info |= update_sac(args, networks, targets, optimizers, obs[i], action[i], next_obs[i], reward, code[i], noise[i])
    return info | {"rollout/reward": reward.mean()}


@torch.no_grad()
def act(policy, obs, skill, num_skills, discrete, rng):
    """Sampled actions [N, ...] of `skill` [N] at obs [N, ...], as env.move takes them."""
    device = policy.bias.device
    outputs = policy(torch.as_tensor(obs, device=device), F.one_hot(torch.as_tensor(skill, device=device), num_skills).float()).cpu()
    if discrete:
        return (outputs.numpy() + rng.gumbel(size=outputs.shape)).argmax(-1)
    noise = rng.standard_normal((len(obs), outputs.shape[-1] // 2), dtype=np.float32)
    return squashed_gaussian(outputs, torch.as_tensor(noise))[0].numpy()


def diayn_skills(args, env, policy):
    """The checkpoint's entry "skills": a skill's one-hot code picks a row of weight_extra, which joins the first bias."""
    weights, biases = stacked_layers(policy.weight_obs, policy.bias + policy.weight_extra, policy.layers)
    return describe_skills(args, env, "diayn", "softmax" if env.obs_scale is None else "tanh_gaussian") | {
        "weights": weights, "biases": biases}


def train_diayn(args):
    env, world, run_dir, checkpoint, identity = begin_run(args, "diayn", ("updates",))
    discrete = world is gridworld
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    networks, targets, optimizers = make_diayn(args, env)
    replay = Replay(args.buffer_size, 1 if discrete else env.obs_size, env.action_shape[0])
    far_cells = env.cell_distance >= np.quantile(env.cell_distance, 0.8)
    done, seconds, sums, rows = 0, 0.0, {}, []
    visited = np.zeros(env.num_cells, dtype=bool)
    elapsed = np.arange(args.num_envs) * args.episode_length // args.num_envs  # episodes do not all end together (B7)
    skill = rng.integers(args.num_skills, size=args.num_envs)
    env.place(np.ones(args.num_envs, dtype=bool), args.prior)
    if checkpoint is not None:
        done, seconds, sums = (checkpoint[key] for key in ("update", "seconds", "sums"))
        stored = load_checkpoint(run_dir / f"replay-{done}.pt")
        replay.rows[: len(stored["rows"])], replay.filled, replay.position = stored["rows"].numpy(), len(stored["rows"]), stored["position"]
        load_networks(checkpoint, networks, targets, optimizers)
        env.set_state(checkpoint["env"])
        rng.bit_generator.state = checkpoint["rng"]
        visited, elapsed, skill = (checkpoint[key].numpy() for key in ("visited", "elapsed", "skill"))
        rows = read_rows(run_dir / "metrics.csv", done)

    begin = time.perf_counter() - seconds
    bar = tqdm(range(done + 1, args.updates + 1), initial=done, total=args.updates, unit="step", dynamic_ncols=True)
    for number in bar:
        ended = elapsed >= args.episode_length
        if ended.any():
            env.place(ended, args.prior)
            skill[ended] = rng.integers(args.num_skills, size=ended.sum())
            elapsed[ended] = 0
        obs, action = env.obs, act(networks["policy"], env.obs, skill, args.num_skills, discrete, rng)
        next_obs = env.move(action)
        elapsed += 1
        good = np.ones(args.num_envs, dtype=bool) if discrete else ~env.last_diverged
        elapsed[~good] = args.episode_length  # that ant was put back to s0: no transition, and a new episode
        replay.add(obs[good], action[good], next_obs[good], skill[good])
        with torch.no_grad():
            guess = networks["discriminator"](torch.as_tensor(next_obs, device=args.device)).argmax(-1).cpu().numpy()
        cells = env.cell(next_obs)
        visited[cells] = True
        info = {"eval/accuracy": (guess == skill).mean(), "eval/far": far_cells[cells].mean()}
        if not discrete:
            info["rollout/flipped"] = env.flipped().mean()
        if number * args.num_envs >= args.learning_starts:
            info |= update(args, networks, targets, optimizers, replay, discrete, rng)
        add_to_sums(sums, info)
        if number % args.log_every == 0 or number == args.updates:
            row = {"update": number, "env_steps": number * args.num_envs, "seconds": time.perf_counter() - begin}
            row |= {key: total / count for key, (total, count) in sorted(sums.items())}
            row |= {"eval/coverage": visited.mean(), "rollout/reached": env.cell_distance[visited].max()}
            if not discrete:
                row["rollout/diverged"] = env.diverged
            sums, visited[:] = {}, False
            log_row(rows, row, run_dir, bar, ("accuracy", "coverage", "far"))
        if number % args.checkpoint_every == 0 or number == args.updates:
            stored = {"rows": torch.as_tensor(replay.rows[: replay.filled]), "position": replay.position}
            state = {"script": "diayn", "args": identity, "update": number, "seconds": time.perf_counter() - begin, "sums": sums,
                     "skills": diayn_skills(args, env, networks["policy"]), "env": as_tensors(env.get_state()),
                     "rng": rng.bit_generator.state, "visited": torch.as_tensor(visited), "elapsed": torch.as_tensor(elapsed),
                     "skill": torch.as_tensor(skill)} | networks_state(networks, targets, optimizers)
            # The buffer has a file of its own, first and under another name: a kill leaves a checkpoint with its own buffer.
            write_atomically(run_dir / f"replay-{number}.pt", lambda file: torch.save(stored, file))
            write_atomically(run_dir / "checkpoint.pt", lambda file: torch.save(state, file))
            for old in run_dir.glob("replay-*.pt"):
                if old.name != f"replay-{number}.pt":
                    old.unlink()
    finish_diayn(args, env, world, networks, rows, run_dir)


def finish_diayn(args, env, world, networks, rows, run_dir):
    """The picture: 4 traces of every skill from s0 over q(z|s); and the last numbers."""
    with torch.no_grad():
        q = networks["discriminator"](torch.as_tensor(env.truth_obs, device=args.device)).softmax(-1).T.cpu().numpy()  # [skills, S]
    skills = diayn_skills(args, env, networks["policy"])
    starts = np.stack([env.truth_obs[env.start_index]] * 4)
    traces, _ = skill_traces(args, skills, list(range(args.num_skills)), starts, world)
    draw_panels(run_dir / "skills.png", env, world, q, traces, [f"skill {z}, q(z|s)" for z in range(args.num_skills)])
    last = rows[-1]
    print(", ".join(f"{key} {last[key]}" for key in last if key.startswith("eval/") and last[key]))
    print(f"{int(last['env_steps']) / float(last['seconds']):,.0f} environment steps per second, {float(last['seconds']) / 60:.1f} minutes")
    print(f"picture: {run_dir}/skills.png")


# =============================================================================================== arguments and files
class UsageError(Exception):
    """Something the user asked for that cannot be done; the message names the cause and the fix."""


def resolve(args):
    """The environment, and the arguments with the values for it in place of None."""
    ant = args.env in antmaze.MAZES or args.env.startswith("ant:")
    if isinstance(args, DCO):
        defaults, least_skills, variant = DCO_ANT if ant else DCO_GRID, 1, "uniform"
        counts = ("samples", "episode_length", "f_updates", "f_batch_size", "f_hidden", "policy_updates")
        numbers = ("f_beta", "f_learning_rate", "actor_learning_rate", "critic_learning_rate")
    else:
        defaults, least_skills, variant = DIAYN_ANT if ant else DIAYN_GRID, 2, args.prior
        counts = ("updates", "updates_per_step", "episode_length", "buffer_size")
        numbers = ("alpha", "learning_rate", "learning_starts")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    counts += ("batch_size", "skill_length", "num_envs", "num_threads", "log_every", "checkpoint_every")
    for name in counts:
        least = 4 if name == "f_batch_size" else 1
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least {least}")
    if args.num_skills < least_skills:
        raise UsageError(f"--num-skills is {args.num_skills}; use at least {least_skills}")
    if not args.hidden or min(args.hidden) < 1:
        raise UsageError(f"--hidden is {args.hidden}; use one number of at least 1 per hidden layer")
    for name in numbers:
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a non-negative number")
    if args.seed < 0:
        raise UsageError(f"--seed is {args.seed}; use a non-negative number")
    for name in ("gamma", "tau") + (("f_discount",) if isinstance(args, DCO) else ()):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use a number from 0 to below 1")
    if isinstance(args, DCO) and not 0 < args.percentile < 100:
        raise UsageError(f"--percentile is {args.percentile}; use a number between 0 and 100")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {args.device!r} is not usable here; try cpu") from None
    env, world = make_env(args)
    if args.episode_length is None:
        args.episode_length = EPISODE.get(args.env, int(env.cell_distance.max()))
    if args.run_dir is None:
        args.run_dir = f"runs/{type(args).__name__.lower()}/{Path(args.env.replace(':', '-')).stem}/{variant}/seed{args.seed}"
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


def networks_state(networks, targets, optimizers):
    return {"networks": networks.state_dict(), "targets": targets.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()}}


def load_networks(checkpoint, networks, targets, optimizers):
    networks.load_state_dict(checkpoint["networks"])
    targets.load_state_dict(checkpoint["targets"])
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(checkpoint["optimizers"][name])


def add_to_sums(sums, info):
    for key, value in info.items():
        total, count = sums.get(key, (0.0, 0))
        sums[key] = (total + float(value), count + 1)


def log_row(rows, row, run_dir, bar, shown):
    rows.append({key: str(value) if isinstance(value, int) else format(value, ".6g") for key, value in row.items()})
    write_rows(run_dir / "metrics.csv", rows)
    bar.set_postfix({key: format(row[f"eval/{key}"], ".2f") for key in shown if f"eval/{key}" in row})


def begin_run(args, script, may_change):
    """What both trainings start with: the environment, the run directory, and with --resume the checkpoint of the same run."""
    torch.set_num_threads(1)  # networks this small run slower on more threads
    torch.set_flush_denormal(True)  # dead ReLU units leave denormal numbers in Adam's averages, which run 2x slower
    env, world = resolve(args)
    run_dir = Path(args.run_dir)
    if not args.resume and (run_dir / "args.json").exists():
        raise UsageError(f"{run_dir} holds a run already; add --resume to continue it or choose another --run-dir")
    identity = {key: value for key, value in asdict(args).items()
                if key not in ("run_dir", "resume", "device", "num_threads", *may_change)}
    path, checkpoint = run_dir / "checkpoint.pt", None
    if args.resume and path.exists():
        checkpoint = load_checkpoint(path)
        if not isinstance(checkpoint, dict) or checkpoint.get("script") != script:
            raise UsageError(f"{path} is not a checkpoint of {script}; choose another --run-dir")
        other = [f"{key} {old!r} there, {identity.get(key)!r} here" for key, old in checkpoint["args"].items() if identity.get(key) != old]
        if other:
            raise UsageError(f"{path} is of another run ({'; '.join(other)}); use its arguments or another --run-dir")
        if script == "diayn" and not (run_dir / f"replay-{checkpoint['update']}.pt").exists():
            raise UsageError(f"{run_dir} has no replay-{checkpoint['update']}.pt, the buffer of its checkpoint; choose another --run-dir")
    run_dir.mkdir(parents=True, exist_ok=True)
    write_args(args, run_dir)
    print(f"writing to {run_dir}" + (f", continuing after update {checkpoint['update']}" if checkpoint else ""))
    return env, world, run_dir, checkpoint, identity


def train(args):
    return train_dco(args) if isinstance(args, DCO) else train_diayn(args)


if __name__ == "__main__":
    try:
        train(tyro.cli(Args))
    except (UsageError, gridworld.MazeError, antmaze.MazeError) as error:
        print(f"baselines_dco_diayn.py: {error}", file=sys.stderr)
        sys.exit(2)

"""Gridworld mazes of TATC: batched dynamics, exact ground truth, drawing.

    python gridworld.py                  # draws the three mazes, prints their facts and a speed benchmark
    python gridworld.py --maze my.txt    # the same for a maze of your own

States are held as integer indices (the paper's one-hot code is their row of the identity). Coordinates are (x, y), 1-based,
y up. The paper's figures give the mazes without cell counts; corridor widths, doors and the T's stem are chosen to fit every
number in its text: the sizes, the goals, and K = about the number of steps to the furthest state.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import matplotlib
import numpy as np
import scipy.linalg
import scipy.ndimage
import scipy.sparse
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from matplotlib.figure import Figure

MAZES = {
    # 30x30, corridor 5 wide along the bottom, the right side and the top; goal (1, 30), 79 steps from (1, 1).
    "umaze": "\n".join(
        ["G" + 29 * "."] + 4 * [30 * "."] + 20 * [25 * "#" + 5 * "."] + 4 * [30 * "."] + ["S" + 29 * "."]
    ),
    # 40x30, an inverted T: bottom corridor 5 high, stem in columns 16-25; goal (25, 30), 53 steps from (1, 1). The goals of the
    # other mazes are corners; a symmetric T with the goal in a corner of its stem has just this stem.
    "tmaze": "\n".join(
        [15 * "#" + 9 * "." + "G" + 15 * "#"] + 24 * [15 * "#" + 10 * "." + 15 * "#"] + 4 * [40 * "."] + ["S" + 39 * "."]
    ),
    # 21x21, doors 3 wide from room 1 (bottom left) to 2 (right) to 3 (top right) to 4 (top left), none from 1 to 4.
    "4rooms": "\n".join(
        ["G" + 9 * "." + "#" + 10 * "."] + 2 * [10 * "." + "#" + 10 * "."] + 3 * [21 * "."] + 4 * [10 * "." + "#" + 10 * "."]
        + [18 * "#" + "..."]
        + 4 * [10 * "." + "#" + 10 * "."] + 3 * [21 * "."] + 2 * [10 * "." + "#" + 10 * "."] + ["S" + 9 * "." + "#" + 10 * "."]
    ),
}
MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # (dx, dy) of the actions: up, right, down, left


class MazeError(ValueError):
    """A maze or an argument that cannot be used; the message names the cause and the fix."""


def parse_maze(text, name):
    """Maze text -> (free [H, W] bool, start (row, column), goal (row, column) or None); row 0 is the top line.

    '#' wall, '.' or ' ' free, 'S' start, 'G' goal; beyond the text is wall. Free cells that cannot be reached
    from S become walls, so that every state has a finite distance.
    """
    lines = text.splitlines()
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise MazeError(f"{name}: the maze is empty; write at least one row with an S")
    marks = {"S": [], "G": []}
    for row, line in enumerate(lines):
        if len(line) != len(lines[0]):
            raise MazeError(f"{name}, line {row + 1}: {len(line)} characters but line 1 has {len(lines[0])}; pad the row with '#'")
        for column, character in enumerate(line):
            if character not in "#. SG":
                raise MazeError(f"{name}, line {row + 1}: unknown character {character!r}; use only '#', '.', ' ', 'S', 'G'")
            if character in marks:
                marks[character].append((row, column))
    if len(marks["S"]) != 1:
        raise MazeError(f"{name}: {len(marks['S'])} start cells; mark exactly one free cell with S")
    if len(marks["G"]) > 1:
        raise MazeError(f"{name}, line {marks['G'][1][0] + 1}: a second goal; mark at most one cell with G")
    open_cells = np.array([[character != "#" for character in line] for line in lines])
    labels, _ = scipy.ndimage.label(open_cells)
    free = labels == labels[marks["S"][0]]
    if free.sum() == 1:
        raise MazeError(f"{name}, line {marks['S'][0][0] + 1}: the start has no free neighbour; open a cell beside S")
    goal = marks["G"][0] if marks["G"] else None
    if goal is not None and not free[goal]:
        raise MazeError(f"{name}, line {goal[0] + 1}: the goal cannot be reached from the start; open a path or move G")
    return free, marks["S"][0], goal


def read_maze(name, built_in):
    """The text of a built-in maze or of a text file, parsed."""
    if name in built_in:
        return parse_maze(built_in[name], name)
    try:
        return parse_maze(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError):
        raise MazeError(f"unknown env {name!r}: not one of {', '.join(built_in)} and not a readable maze text file") from None


def make(name, num_envs, seed, **kwargs):
    """The vector environment of a built-in maze or of a maze text file."""
    return GridWorldVec(name, num_envs, seed=seed, **kwargs)


class GridWorldVec(VectorEnv):
    """N agents in lock-step in one maze.

    Training loops use the episode-free part: `obs` [N], `move`, `place`, `get_state`, `set_state`. `reset` and `step` are
    Gymnasium's goal task on top of it: reward 1 on reaching the goal, which terminates; truncation after 100 steps.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}

    def __init__(self, maze="umaze", num_envs=1, *, seed=None, start="s0", max_episode_steps=100):
        if num_envs < 1:
            raise MazeError(f"num_envs is {num_envs}; use at least 1")
        if start not in ("s0", "uniform"):
            raise MazeError(f"start is {start!r}; use 's0' or 'uniform'")
        if max_episode_steps < 1:
            raise MazeError(f"max_episode_steps is {max_episode_steps}; use at least 1")
        self.name, self.num_envs, self.start, self.max_episode_steps = maze, num_envs, start, max_episode_steps
        self.free, start_cell, goal_cell = read_maze(maze, MAZES)
        height = len(self.free)
        index = np.full(self.free.shape, -1)
        index[self.free] = np.arange(self.free.sum())
        self.num_states = int(self.free.sum())
        rows, columns = np.nonzero(self.free)
        self.truth_obs = np.arange(self.num_states)
        self.truth_xy = np.stack([columns + 1, height - rows], axis=1)  # [S, 2]
        self.start_index = int(index[start_cell])
        self.goal_index = None if goal_cell is None else int(index[goal_cell])

        self.next_state = np.empty((self.num_states, 4), dtype=np.int64)  # [S, 4]
        padded = np.pad(index, 1, constant_values=-1)
        for action, (dx, dy) in enumerate(MOVES):
            target = padded[rows + 1 - dy, columns + 1 + dx]
            self.next_state[:, action] = np.where(target < 0, self.truth_obs, target)
        adjacency = scipy.sparse.csr_matrix(
            (np.ones(4 * self.num_states), (np.repeat(self.truth_obs, 4), self.next_state.ravel())), (self.num_states,) * 2
        )
        self.distance = scipy.sparse.csgraph.shortest_path(adjacency, unweighted=True).astype(np.float32)  # [S, S]

        # What the algorithm files ask of an environment beside its dynamics (antmaze.py has the same names).
        self.action_shape, self.obs_size, self.obs_scale, self.phi_scale = (1, 4), self.num_states, None, None
        self.num_cells, self.cell_xy, self.cell_distance = self.num_states, self.truth_xy, self.distance[self.start_index]

        self.single_observation_space = gymnasium.spaces.Discrete(self.num_states)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = gymnasium.spaces.MultiDiscrete(np.full(num_envs, self.num_states))
        self.action_space = gymnasium.spaces.MultiDiscrete(np.full(num_envs, 4))
        self.rng = np.random.default_rng(seed)
        self.obs = np.full(num_envs, self.start_index)
        self.elapsed = np.zeros(num_envs, dtype=np.int64)
        self.autoreset = np.zeros(num_envs, dtype=bool)

    # ---------------------------------------------------------------------------------------- episode-free dynamics
    def move(self, actions):
        """Act with `actions` [N] or [N, 1] in 0..3; returns the next states [N]. A blocked move stays."""
        self.obs = self.next_state[self.obs, actions.reshape(-1)]
        return self.obs

    def place(self, mask, where):
        """Put the agents of `mask` [N] at "s0", at "uniform" free states, or at the given states [mask.sum()]."""
        self.obs = self.obs.copy()
        if isinstance(where, str):
            self.obs[mask] = self.start_index if where == "s0" else self.rng.integers(self.num_states, size=mask.sum())
        else:
            self.obs[mask] = where

    def cell(self, obs):
        """The coverage cell of each observation: the state itself."""
        return obs

    def get_state(self):
        """Everything that `set_state` needs to continue bit for bit: arrays, numbers and strings."""
        return {"obs": self.obs.copy(), "elapsed": self.elapsed.copy(), "autoreset": self.autoreset.copy(),
                "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        self.obs, self.elapsed, self.autoreset = (np.asarray(state[key]).copy() for key in ("obs", "elapsed", "autoreset"))
        self.rng.bit_generator.state = state["rng"]

    # ------------------------------------------------------------------------------------------ Gymnasium goal task
    def reset(self, *, seed=None, options=None):
        """Options: {"start": "s0" or "uniform"}, {"reset_mask": bool [N]}."""
        options = options or {}
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        mask = np.asarray(options.get("reset_mask", np.ones(self.num_envs, dtype=bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != bool:
            raise MazeError(f"reset_mask has shape {mask.shape} and type {mask.dtype}; use bool [{self.num_envs}]")
        self.place(mask, options.get("start", self.start))
        self.elapsed[mask] = 0
        self.autoreset[mask] = False
        return self.obs.copy(), {}

    def step(self, actions):
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or not np.issubdtype(actions.dtype, np.integer) or not (actions // 4 == 0).all():
            raise MazeError(f"actions must be {self.num_envs} integers in 0..3")
        done = self.autoreset
        if done.any():
            self.place(done, self.start)
        before = self.obs
        self.move(actions)
        self.obs[done] = before[done]
        self.elapsed = np.where(done, 0, self.elapsed + 1)
        terminated = (self.obs == self.goal_index) & ~done
        truncated = (self.elapsed >= self.max_episode_steps) & ~terminated & ~done
        self.autoreset = terminated | truncated
        return self.obs.copy(), terminated.astype(np.float64), terminated, truncated, {}

    # ------------------------------------------------------------------------------------------- exact ground truth
    def random_walk(self):
        """Transition matrix [S, S] of the uniform policy; symmetric, since a blocked move stays."""
        matrix = np.zeros((self.num_states, self.num_states))
        np.add.at(matrix, (np.repeat(self.truth_obs, 4), self.next_state.ravel()), 0.25)
        return matrix

    def laplacian_eigenvectors(self, count):
        """The `count` smallest eigenvalues [count] and eigenvectors [S, count] of I - P, the first one constant."""
        return scipy.linalg.eigh(np.eye(self.num_states) - self.random_walk(), subset_by_index=(0, count - 1))

    def optimal_values(self, gamma):
        """V* [S] of the goal task: gamma^(distance - 1), and 0 at the goal itself, which is terminal."""
        distance = self.distance[:, self.goal_index]
        return np.where(distance > 0, gamma ** (distance - 1.0), 0.0)

    def policy_values(self, policy, gamma):
        """V [S] of `policy` [S, 4] on the goal task without the time limit, by solving the Bellman equation."""
        matrix = np.zeros((self.num_states, self.num_states))
        np.add.at(matrix, (np.repeat(self.truth_obs, 4), self.next_state.ravel()), policy.ravel())
        reward = matrix[:, self.goal_index].copy()
        matrix[:, self.goal_index] = 0.0
        reward[self.goal_index] = matrix[self.goal_index] = 0.0
        return np.linalg.solve(np.eye(self.num_states) - gamma * matrix, reward)


class GridWorldEnv(gymnasium.Env):
    """One agent on the goal task of a maze; `render_mode="ansi"` gives the maze as text with the agent as 'A'."""

    metadata = {"render_modes": ["ansi"], "render_fps": 10}

    def __init__(self, maze="umaze", render_mode=None, **kwargs):
        self.vec = GridWorldVec(maze, 1, **kwargs)
        self.observation_space, self.action_space = self.vec.single_observation_space, self.vec.single_action_space
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self.vec.reset(seed=seed, options=options)
        return int(obs[0]), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.vec.step(np.array([action]))
        return int(obs[0]), float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self):
        picture = np.where(self.vec.free, ".", "#")
        for index, mark in ((self.vec.goal_index, "G"), (self.vec.obs[0], "A")):
            if index is not None:
                x, y = self.vec.truth_xy[index]
                picture[len(picture) - y, x - 1] = mark
        return "\n".join("".join(row) for row in picture)


for _id, _maze in (("UMaze", "umaze"), ("TMaze", "tmaze"), ("4Rooms", "4rooms")):
    gymnasium.register(
        f"TATC/{_id}-v0", entry_point=GridWorldEnv, vector_entry_point=GridWorldVec, kwargs={"maze": _maze}
    )


# ---------------------------------------------------------------------------------------------------------- drawing
def draw_maze(ax, env, values=None, label=None):
    """The maze with walls black; `values` [S] as colours (default: distance from s0); s0 red, goal green."""
    values = env.distance[env.start_index] if values is None else values
    height, width = env.free.shape
    picture = np.full(env.free.shape, np.nan)
    picture[height - env.truth_xy[:, 1], env.truth_xy[:, 0] - 1] = values
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="black")
    image = ax.imshow(picture, cmap=colours, extent=(0.5, width + 0.5, 0.5, height + 0.5))
    for index, colour in ((env.goal_index, "limegreen"), (env.start_index, "red")):
        if index is not None:
            ax.plot(*env.truth_xy[index], "o", color=colour, markersize=6)
    ax.set(xticks=(1, width), yticks=(1, height))
    if label:
        ax.figure.colorbar(image, ax=ax, label=label, shrink=0.8)


def draw_phi(ax, env, phi):
    """The representation phi [S, d] (its first two dimensions), coloured by distance from s0; equal axes, s0 red."""
    ax.scatter(phi[:, 0], phi[:, 1], c=env.distance[env.start_index], s=8, cmap="viridis")
    ax.plot(phi[env.start_index, 0], phi[env.start_index, 1], "o", color="red", markersize=6)
    low, high = phi[:, :2].min(0), phi[:, :2].max(0)
    (x, y), half = (low + high) / 2, 0.55 * max(*(high - low), 1e-9)  # a square window: equal axes that cut nothing off
    ax.set(xlim=(x - half, x + half), ylim=(y - half, y + half))
    ax.set_aspect("equal")
    ax.tick_params(labelsize=7)


def draw_representation(path, env, phi):
    """The maze and phi [S, d] side by side in the same colours."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_maze(left, env, label="steps from s0")
    draw_phi(right, env, phi)
    right.set_title("phi")
    figure.savefig(path, dpi=110)


def draw_progress(path, env, snapshots, titles):
    """A row of representations [S, d], one per stage of training."""
    figure = Figure(figsize=(2.4 * (len(snapshots) + 1), 2.7), layout="constrained")
    axes = figure.subplots(1, len(snapshots) + 1)
    draw_maze(axes[0], env)
    for ax, phi, title in zip(axes[1:], snapshots, titles):
        draw_phi(ax, env, phi)
        ax.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)


def draw_skills(path, env, policy, directions):
    """Mean step of each skill: policy [skills, S, 4] probabilities, directions [skills, 2] of phi.

    An arrow in every second cell: its direction is the mean step's, its colour the mean step's length, 0 to 1.
    """
    moved = env.truth_xy[env.next_state] - env.truth_xy[:, None]  # [S, 4, 2]
    steps = np.einsum("ksa,sad->ksd", policy, moved)
    shown = (env.truth_xy % 2 == 1).all(1)
    columns = (len(policy) + 1) // 2
    height, width = env.free.shape
    figure = Figure(figsize=(3.2 * columns + 1, max(3.0, 6.6 * height / width) + 0.6), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    for ax, step, direction in zip(axes.ravel(), steps, directions):
        draw_maze(ax, env, np.zeros(env.num_states))
        ax.images[0].set_cmap(matplotlib.colors.ListedColormap(["white"]).with_extremes(bad="0.6"))
        length = np.linalg.norm(step, axis=1, keepdims=True)
        arrow = 1.7 * step / np.maximum(length, 1e-9)
        arrows = ax.quiver(*env.truth_xy[shown].T, *arrow[shown].T, length[shown, 0], angles="xy", scale_units="xy", scale=1,
                           pivot="mid", width=0.007, cmap="viridis_r", clim=(0, 1))
        ax.set_title(f"delta = ({direction[0]:.2f}, {direction[1]:.2f})", fontsize=9)
    figure.colorbar(arrows, ax=axes, label="mean step", shrink=0.6)
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------- main
@dataclass
class Args:
    maze: str = "all"
    """umaze, tmaze, 4rooms, a maze text file, or all three built-in mazes"""
    picture: str = "gridworlds.png"
    """where the drawing goes"""
    benchmark_seconds: float = 1.0
    """how long each side of the speed benchmark runs; 0 skips it"""


def steps_per_second(step, steps_per_call, seconds):
    """Env steps per CPU second of calling `step()` over and over for `seconds`."""
    step()
    calls, begin = 0, time.process_time()
    while time.process_time() - begin < seconds:
        step()
        calls += 1
    return calls * steps_per_call / (time.process_time() - begin)


def main(args):
    envs = [make(name, 32, 0) for name in (MAZES if args.maze == "all" else [args.maze])]
    figure = Figure(figsize=(4.5 * len(envs), 4), layout="constrained")
    for ax, env in zip(figure.subplots(1, len(envs), squeeze=False)[0], envs):
        draw_maze(ax, env, label="steps from s0")
        ax.set_title(env.name)
        from_start = env.distance[env.start_index]
        goal = "no goal" if env.goal_index is None else f"goal {from_start[env.goal_index]:.0f} steps away"
        print(f"{env.name}: {env.num_states} states, furthest {from_start.max():.0f} steps from s0, {goal}")
    figure.savefig(args.picture, dpi=110)
    print(f"picture: {args.picture}")
    if args.benchmark_seconds > 0:
        env = envs[0]
        sync = gymnasium.vector.SyncVectorEnv([lambda: GridWorldEnv(env.name)] * 32)
        sync.reset(seed=0)
        env.reset(seed=0)
        actions = np.random.default_rng(0).integers(4, size=32)
        rates = {
            "gymnasium.SyncVectorEnv of 32 single envs": steps_per_second(lambda: sync.step(actions), 32, args.benchmark_seconds),
            "GridWorldVec.step, 32 agents": steps_per_second(lambda: env.step(actions), 32, args.benchmark_seconds),
            "GridWorldVec.move, 32 agents": steps_per_second(lambda: env.move(actions), 32, args.benchmark_seconds),
        }
        slowest = min(rates.values())
        for name, rate in rates.items():
            print(f"{name}: {rate:,.0f} env steps per CPU second, {rate / slowest:.1f}x")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except MazeError as error:
        print(f"gridworld.py: {error}", file=sys.stderr)
        sys.exit(2)

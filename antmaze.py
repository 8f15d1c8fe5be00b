"""AntMaze-1, AntMaze-2, AntMaze-Large and any maze text file: batched MuJoCo ants for TATC
(UAI 2022, Section 4.2, Appendix C.2).

    python antmaze.py --maze my.txt    # checks and draws a maze

The ant has Gymnasium's dimensions, masses and joint ranges, and its motors in the order of its joints (hip
and ankle of each leg). The paper gives neither torque nor time step. We take torque 30 and dt 0.1, as HIRO
and D4RL do, in 5 steps of 0.02 with MuJoCo's implicitfast integrator and a contact time (solref) of 0.06:
after 500 random steps 6 % of the ants lie on their back. With 20 RK4 steps of 0.005 it is 3 %, with other
ants' torques of 75 or 150 all of them (results/README.md, "Physics").
"""
import ctypes.util
import importlib
import math
import os
import runpy
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import scipy.ndimage
import scipy.sparse.csgraph
import scipy.sparse.linalg
import tyro
from gymnasium.vector.utils import batch_space
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import gridworld
from gridworld import UsageError, whole

# MuJoCo picks its OpenGL on import: without a display EGL, if it is there (naming a missing one breaks it).
if not os.environ.get("DISPLAY") and ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")
import mujoco  # noqa: E402
import mujoco.batch  # noqa: E402

MAZES = {  # a U and a spiral as in the paper's figures, whose text gives no sizes
    "antmaze1": """
#######
#G....#
#####.#
#####.#
#####.#
#S....#
#######""".lstrip(),
    "antmaze2": """
#######
#.....#
#.###.#
#..G#.#
#####.#
#S....#
#######""".lstrip(),
    # D4RL's and Gymnasium-Robotics' large map; not in the paper.
    "antmaze-large": """
############
#S...#.....#
#.##.#.#.#.#
#......#...#
#.####.###.#
#..#.#.....#
##.#.#.#.###
#..#...#.G.#
############""".lstrip(),
}
gridworld.TITLES.update({"antmaze1": "AntMaze-1", "antmaze2": "AntMaze-2", "antmaze-large": "AntMaze-Large"})
BLOCK = 4.0  # units per maze character; the goal radius epsilon = 2 is half of it
GOAL_RADIUS = 2.0
MOST_BLOCKS = 200
# Reset pose: torso height, upright, hips straight, ankles at 1 rad (range 30 to 70 degrees).
RESET_POSE = np.array([0, 0, 0.55, 1, 0, 0, 0, 0, 1, 0, -1, 0, -1, 0, 1] + [0] * 14, np.float64)
LEGS = ((1, 1), (-1, 1), (-1, -1), (1, -1))


# --------------------------------------------------------------------------------------- the ant and its maze
def wall_boxes(free):
    """Greedy rectangles of blocks (top, bottom, left, right; ends excluded) over all walls of free [H, W]."""
    open_walls, boxes = ~free, []
    while open_walls.any():
        top, left = np.argwhere(open_walls)[0]
        bottom, right = top + 1, left + 1
        while right < free.shape[1] and not free[top, right]:
            right += 1
        while bottom < free.shape[0] and not free[bottom, left:right].any():
            bottom += 1
        boxes.append((top, bottom, left, right))
        open_walls[top:bottom, left:right] = False
    return boxes


def build_model(free, start, plain=False):
    """The ant in a maze -> MjModel; free [H, W] bool, start (row, column) is the block around xy = (0, 0).

    The fast model and the plain one (each wall block a low box, contacts found by MuJoCo; what is rendered)
    hold the same ant and the same walls:
    - Four planes bound the free blocks, boxes 4 high fill what is wall inside: no ant can jump out.
    - The hip stubs are geoms of the torso's body, as MuJoCo's fusestatic would make them.
    - Contacts are explicit pairs with the margin and friction that MuJoCo would derive from the geoms. The
      hip stubs have none: torso and thighs enclose them but for a notch of 0.01, and their pairs would cost
      10% more time.
    """
    rows, columns = np.nonzero(free)
    if plain:
        free, start = np.pad(free, 1), (start[0] + 1, start[1] + 1)
        boxes, height = [(row, row + 1, column, column + 1) for row, column in np.argwhere(~free)], 1.0
    else:
        free = free[rows.min():rows.max() + 1, columns.min():columns.max() + 1]
        start = (start[0] - rows.min(), start[1] - columns.min())
        boxes, height = wall_boxes(free), 4.0
    west, north = -(start[1] + 0.5) * BLOCK, (start[0] + 0.5) * BLOCK
    east, south = west + free.shape[1] * BLOCK, north - free.shape[0] * BLOCK
    walls, solids = "", ["floor"]
    sides = (west, 0, "1 0 0"), (east, 0, "-1 0 0"), (0, south, "0 1 0"), (0, north, "0 -1 0")
    for i, (x, y, axis) in enumerate(() if plain else sides):
        walls += f'<geom name="plane{i}" type="plane" pos="{x} {y} 0" zaxis="{axis}" size="1 1 1"/>'
        solids.append(f"plane{i}")
    for i, (top, bottom, left, right) in enumerate(boxes):
        walls += (f'<geom name="box{i}" type="box" pos="{west + (left + right) / 2 * BLOCK} '
                  f'{north - (top + bottom) / 2 * BLOCK} {height / 2}" rgba=".55 .5 .45 1" '
                  f'size="{(right - left) / 2 * BLOCK} {(bottom - top) / 2 * BLOCK} {height / 2}"/>')
        solids.append(f"box{i}")
    legs, motors = "", ""
    for i, (x, y) in enumerate(LEGS):
        stub = f'<geom name="stub{i}" type="capsule" fromto="0 0 0 {.2 * x} {.2 * y} 0" size=".08"/>'
        leg = f"""
          <body pos="{.2 * x} {.2 * y} 0">
            <joint name="hip{i}" axis="0 0 1" range="-30 30"/>
            <geom name="thigh{i}" type="capsule" fromto="0 0 0 {.2 * x} {.2 * y} 0" size=".08"/>
            <body pos="{.2 * x} {.2 * y} 0">
              <joint name="ankle{i}" axis="{-x * y} 1 0" range="{'30 70' if x > 0 else '-70 -30'}"/>
              <geom name="shin{i}" type="capsule" fromto="0 0 0 {.4 * x} {.4 * y} 0" size=".08"/>
            </body>
          </body>"""
        legs += f"<body>{stub}{leg}</body>" if plain else stub + leg
        motors += f'<motor joint="hip{i}"/><motor joint="ankle{i}"/>'
    pairs = "" if plain else "".join(
        f'<pair geom1="{part}" geom2="{solid}" condim="3" friction="1 1 .5 .5 .5" margin=".02" '
        'solref=".06 1"/>'
        for solid in solids
        for part in ["torso"] + [f"{name}{i}" for name in ("thigh", "shin") for i in range(4)])
    return mujoco.MjModel.from_xml_string(f"""
    <mujoco model="antmaze">
      <compiler angle="degree"/>
      <option timestep=".02" integrator="implicitfast"><flag island="disable" warmstart="disable"/></option>
      <asset><texture name="sky" type="skybox" builtin="flat" rgb1="1 1 1" width="8" height="8"/>
        <texture name="tiles" type="2d" builtin="checker" rgb1=".86 .88 .9" rgb2=".78 .8 .84"
          width="64" height="64"/>
        <material name="tiles" texture="tiles" texrepeat="1 1" texuniform="true"/></asset>
      <visual><headlight ambient=".45 .45 .45" diffuse=".5 .5 .5" specular="0 0 0"/></visual>
      <default>
        <joint type="hinge" armature="1" damping="1" limited="true" solreflimit=".04 1"/>
        <geom contype="0" conaffinity="{int(plain)}" condim="3" density="5" friction="1 .5 .5" margin=".01"
          solref=".06 1"/>
        <motor ctrlrange="-1 1" ctrllimited="true" gear="30"/>
        <default class="ant"><geom contype="{int(plain)}" conaffinity="0" rgba=".75 .35 .2 1"/></default>
      </default>
      <worldbody>
        <geom name="floor" type="plane" size="{2 * BLOCK * max(free.shape)} {2 * BLOCK * max(free.shape)} 1"
          material="tiles"/>
        {walls}
        <body name="torso" pos="0 0 .55" childclass="ant">
          <joint name="root" type="free" armature="0" damping="0" limited="false"/>
          <geom name="torso" size=".25"/>{legs}
        </body>
      </worldbody>
      <actuator>{motors}</actuator>
      <contact>{pairs}</contact>
    </mujoco>""")


def on_back(states):
    """states [..., 29] -> [...] bool: the torso's up axis points down, 1 - 2 (x^2 + y^2) < 0."""
    return states[..., 4] ** 2 + states[..., 5] ** 2 > 0.5


# -------------------------------------------------------------------------------------------------- the batch
class AntMazeVec(gymnasium.vector.VectorEnv):
    """N ants in lock-step, each alone in its own copy of the maze.

    Training loops use `obs`, `move` and `place` (no episodes); Gymnasium's `reset` and `step` add the goal
    task: reward 1 and termination within GOAL_RADIUS of the goal, truncation after max_episode_steps.
    Results do not depend on num_threads.
    """
    metadata = gridworld.GridWorldVec.metadata
    obs_size, action_shape, defaults, no_opengl = 29, (8, 5), "ants", None
    # Network input is obs * obs_scale. Fixed, so that a checkpoint keeps its meaning: x, y to 0.6 per block,
    # height, quaternion and joint angles as they are, velocities to order 1.
    obs_scale = np.array([0.6 / BLOCK] * 2 + [1] * 13 + [0.5] * 3 + [0.3] * 3 + [0.2] * 8, np.float32)
    # D6: a representation sees x, y at four times that scale and the rest at a fiftieth of it. Where the ant
    # is counts most, and corridors side by side in the plane have to come apart.
    phi_scale = obs_scale * np.array([4] * 2 + [0.02] * 27, np.float32)

    def __init__(self, maze="antmaze1", num_envs=32, seed=0, num_threads=1, discrete=False,
                 max_episode_steps=1000, start="s0", render_mode=None):
        gridworld.set_up(self, num_envs, seed, start, max_episode_steps, render_mode, num_threads)
        self._renderer = None
        self._maze = maze if isinstance(maze, tuple) else gridworld.read_maze(str(maze), MAZES, MOST_BLOCKS)
        name, self.free, self.start_block, goal = self._maze
        self.name = name if name in MAZES else f"ant-{name}"
        self.model = build_model(self.free, self.start_block)
        self._batch = mujoco.batch.Batch(self.model, self.num_envs, int(num_threads))
        self._rows = self._batch.state  # time, qpos 15, qvel 14, warm start, ctrl ...: all a step depends on
        self._physics = self._rows[:, 1:30]
        self._ctrl = self._batch.bind("ctrl")
        self._warnings = self._batch.warning[:, :, 1]
        self._measure_maze(goal)
        # Beyond these bounds an ant has left the maze or its physics diverged; NaN fails the comparison too.
        (left, top), (right, bottom) = self.corner, self.far_corner
        self._bounds = np.array([[left, bottom, -0.5] + [-1000] * 26, [right, top, 3.5] + [1000] * 26])
        self.diverged, self.last_diverged = 0, np.zeros(self.num_envs, bool)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (29,), np.float32)
        self.single_action_space = (gymnasium.spaces.MultiDiscrete([5] * 8) if discrete
                                    else gymnasium.spaces.Box(-1.0, 1.0, (8,), np.float32))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.reset()

    # ------------------------------------------------------------------------------------------- ground truth
    def _measure_maze(self, goal):
        """Positions, cells and geodesic distances from the blocks; coordinates (x, y), y up, s0 = (0, 0)."""
        row, column = self.start_block
        self.corner = np.array([-(column + 0.5) * BLOCK, (row + 0.5) * BLOCK])  # top left
        self.far_corner = self.corner + np.multiply(self.free.shape[::-1], (BLOCK, -BLOCK))  # bottom right
        self.goal_xy = None if goal is None else np.array([goal[1] - column, row - goal[0]]) * BLOCK

        def split(parts):  # [H * parts, W * parts]: each block cut into parts x parts squares
            return np.kron(self.free, np.ones((int(parts), int(parts)), bool))

        def corners(squares):  # [H + 1, W + 1]: corners of squares whose four squares are all free
            return scipy.ndimage.binary_erosion(np.pad(squares, 1), np.ones((2, 2)))[1:, 1:]

        def numbers(mask):  # [H, W]: 0, 1, ... where mask is True, elsewhere the number of the nearest one
            nearest = scipy.ndimage.distance_transform_edt(~mask, return_distances=False, return_indices=True)
            return (np.cumsum(mask).reshape(mask.shape) - 1)[tuple(nearest)]

        # Geodesic graph: points 0.5 apart, at least 0.5 from any wall (a torso comes no closer than 0.25).
        nodes = corners(split(2 * BLOCK))
        self._node, size = numbers(nodes), (nodes.sum(), nodes.sum())
        self._graph = scipy.sparse.csr_matrix(size)
        here = np.argwhere(nodes[:-1, 1:-1]) + (0, 1)  # the rim is never free
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            there = here + (down, right)
            both = nodes[tuple(there.T)]
            both &= nodes[here[:, 0], there[:, 1]] & nodes[there[:, 0], here[:, 1]]  # diagonals cut no corner
            ends = self._node[tuple(here[both].T)], self._node[tuple(there[both].T)]
            length = np.full(both.sum(), 0.5 * np.hypot(down, right))
            self._graph += scipy.sparse.csr_matrix((length, ends), size)

        # Positional states for the pictures: whole units, at least 1 from any wall, so that the legs fit too.
        fits = np.argwhere(corners(split(BLOCK)))
        self.truth_xy = self.corner + fits[:, ::-1] * (1, -1)
        self.truth_obs = np.tile(RESET_POSE, (len(fits), 1)).astype(np.float32)
        self.truth_obs[:, :2] = self.truth_xy
        truth_nodes = self._nearest_node(self.truth_xy)
        self.distance = scipy.sparse.csgraph.dijkstra(  # [S, S]
            self._graph, directed=False, indices=truth_nodes)[:, truth_nodes].astype(np.float32)
        self.start_index = int(np.linalg.norm(self.truth_xy, axis=1).argmin())
        self.goal_index = (None if goal is None
                           else int(np.linalg.norm(self.truth_xy - self.goal_xy, axis=1).argmin()))

        cells = split(BLOCK)
        self.num_cells = int(cells.sum())
        self.cell_xy = self.corner + (np.argwhere(cells)[:, ::-1] + 0.5) * (1, -1)
        self._cell = numbers(cells)
        self.cell_distance = self.geodesic(self.cell_xy, np.zeros(2))
        # Free-space sampler: quarter-unit squares at least 1 from any wall, where no reset pose touches one.
        squares = scipy.ndimage.binary_erosion(split(4 * BLOCK), np.ones((3, 3)), iterations=4)
        self._squares = self.corner + np.argwhere(squares)[:, ::-1] * (0.25, -0.25)

    def _nearest_node(self, xy):
        column, row = np.rint((np.asarray(xy) - self.corner) * (2, -2)).astype(int).T
        return self._node[row.clip(0, self._node.shape[0] - 1), column.clip(0, self._node.shape[1] - 1)]

    def geodesic(self, xy_a, xy_b):
        """Shortest way between xy_a [n, 2] and xy_b [2] -> [n] float32, both rounded to the 0.5 grid."""
        distance = scipy.sparse.csgraph.dijkstra(
            self._graph, directed=False, indices=self._nearest_node(xy_b))
        return distance[self._nearest_node(xy_a)].astype(np.float32)

    def laplacian_eigenvectors(self, count):
        """The `count` smallest eigenvalues [count] of the maze's Laplacian and its eigenfunctions at the
        truth states [S, count].

        The Laplacian has the 0.5-unit graph's horizontal and vertical edges: diffusion that walls reflect.
        """
        edges = self._graph.copy()
        edges.data = (edges.data < 0.6).astype(float)
        laplacian = scipy.sparse.csgraph.laplacian(edges + edges.T)
        values, vectors = scipy.sparse.linalg.eigsh(
            laplacian.tocsc(), count, sigma=-1e-6, v0=np.ones(laplacian.shape[0]))
        order = np.argsort(values)
        return values[order], vectors[self._nearest_node(self.truth_xy)][:, order]

    def cell(self, obs):
        """The 1x1 cell of each position; obs [n, >= 2] -> [n] int, walls count as the nearest free cell."""
        column, row = np.floor((np.asarray(obs)[:, :2] - self.corner) * (1, -1)).astype(int).T
        return self._cell[row.clip(0, self._cell.shape[0] - 1), column.clip(0, self._cell.shape[1] - 1)]

    # ----------------------------------------------------------------------------------------- plain dynamics
    def move(self, actions):
        """One step of all ants: actions [N, 8], int in 0..4 or float in [-1, 1] (clipped) -> obs [N, 29].

        No autoreset, but an ant whose physics diverged goes back to s0, marked in last_diverged and counted.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs, 8):
            raise UsageError(f"actions must have shape ({self.num_envs}, 8), got {actions.shape}")
        if actions.dtype.kind in "iu":
            if actions.min() < 0 or actions.max() > 4:
                raise UsageError(f"actions must be indices 0..4, got {actions.min()}..{actions.max()}")
            actions = actions / 2 - 1  # the paper's 5 equally spaced torques: -1, -0.5, 0, 0.5, 1
        elif actions.dtype.kind != "f":
            raise UsageError(f"actions must be integers 0..4 or floats in [-1, 1], got dtype {actions.dtype}")
        elif not np.isfinite(actions).all():
            raise UsageError("actions must be finite, got NaN or infinity")
        self._ctrl[:] = actions
        failed = []
        try:
            self._batch.step(nstep=5)
        except mujoco.batch.SimulationError as error:
            failed = list(error.ids)
        low, high = self._bounds
        good = ((self._physics > low) & (self._physics < high)).all(1)
        column, row = ((self._physics[good, :2] - self.corner) * (1 / BLOCK, -1 / BLOCK)).astype(int).T
        good[good] = self.free[row, column]
        # MuJoCo resets a diverged simulation by itself; only its counter tells.
        self.last_diverged = ~good | self._warnings.any(1)
        self.last_diverged[failed] = True
        self._warnings[:] = 0
        if self.last_diverged.any():
            self.diverged += int(self.last_diverged.sum())
            self.place(self.last_diverged, "s0")
        else:
            self.obs = self._physics.astype(np.float32)
        return self.obs

    def place(self, mask, where):
        """Puts ants of mask [N] bool at "s0" or "uniform" positions (with noise), or in states [n, 29]."""
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != bool:
            raise UsageError(f"mask must be bool of shape ({self.num_envs},), got {mask.dtype} {mask.shape}")
        count = int(mask.sum())
        if isinstance(where, str):
            if where not in ("s0", "uniform"):
                raise UsageError(f"where must be 's0', 'uniform' or states [n, 29], got {where!r}")
            states = np.tile(RESET_POSE, (count, 1))
            if where == "uniform":
                square = self.rng.integers(len(self._squares), size=count)
                states[:, :2] = self._squares[square] + self.rng.uniform(0, 0.25, (count, 2)) * (1, -1)
                heading = self.rng.uniform(-np.pi, np.pi, count)
                states[:, 3], states[:, 6] = np.cos(heading / 2), np.sin(heading / 2)
            # Gymnasium's Ant: uniform on positions, normal on velocities.
            states[:, :15] += self.rng.uniform(-0.1, 0.1, (count, 15))
            states[:, 15:] += 0.1 * self.rng.standard_normal((count, 14))
        else:
            states = np.asarray(where, np.float64).copy()
            if states.shape != (count, 29) or not np.isfinite(states).all():
                raise UsageError(f"where must be finite states of shape ({count}, 29), got {states.shape}")
        norm = np.linalg.norm(states[:, 3:7], axis=1, keepdims=True)
        if (norm < 1e-6).any():
            raise UsageError("where must hold unit quaternions in columns 3:7, got zeros")
        states[:, 3:7] /= norm
        self._rows[mask] = 0.0
        self._physics[mask] = states
        self.obs = self._physics.astype(np.float32)

    def fallen(self):
        """Ants on their back -> [N] bool: they have to go back to s0 before the next episode (D7)."""
        return on_back(self._physics)

    def get_state(self):
        """All that the next step depends on, as plain arrays, numbers and strings."""
        return {"rows": self._rows.copy(), "steps": self.elapsed.copy(), "done": self.autoreset.copy(),
                "diverged": self.diverged, "last_diverged": self.last_diverged.copy(),
                "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        """Continues bit for bit from get_state(); arrays may have become torch tensors."""
        rows = np.asarray(state["rows"])
        if rows.shape != self._rows.shape:
            raise UsageError(f"the stored state has rows of shape {rows.shape}, not {self._rows.shape}; "
                             "same num_envs?")
        self._rows[:] = rows
        self.elapsed, self.autoreset = np.asarray(state["steps"]).copy(), np.asarray(state["done"]).copy()
        self.diverged, self.last_diverged = int(state["diverged"]), np.asarray(state["last_diverged"]).copy()
        self.rng.bit_generator.state = state["rng"]
        self.obs = self._physics.astype(np.float32)

    # ---------------------------------------------------------------------------------------------- Gymnasium
    def reset(self, *, seed=None, options=None):
        return gridworld.goal_reset(self, seed, options)

    def step(self, actions):
        """-> obs [N, 29], reward [N], terminated [N], truncated [N], info: is_success and diverged [N]."""
        self.move(actions)
        reached = np.zeros(self.num_envs, bool)
        if self.goal_xy is not None:
            reached = np.linalg.norm(self._physics[:, :2] - self.goal_xy, axis=1) <= GOAL_RADIUS
        diverged, every = self.last_diverged, np.ones(self.num_envs, bool)
        obs, reward, terminated, truncated = gridworld.goal_step(self, reached, diverged)
        return obs, reward, terminated, truncated, {
            "is_success": terminated.copy(), "_is_success": every, "diverged": diverged, "_diverged": every}

    def render(self):
        """A picture [480, 480, 3] of each ant in its maze."""
        if self.render_mode is None:
            return None
        if self._renderer is None and AntMazeVec.no_opengl is None:
            try:
                model = build_model(self.free, self.start_block, plain=True)
                self._renderer = mujoco.Renderer(model, 480, 480)
            except Exception as error:  # each GL backend fails in its own way, and a second try may abort
                AntMazeVec.no_opengl = str(error)
        if self._renderer is None:
            raise UsageError(f"rendering needs OpenGL ({AntMazeVec.no_opengl}); "
                             "set MUJOCO_GL=egl or osmesa")
        data, camera = mujoco.MjData(self._renderer.model), mujoco.MjvCamera()
        camera.lookat[:2] = (self.corner + self.far_corner) / 2
        camera.distance, camera.azimuth, camera.elevation = 1.3 * BLOCK * max(self.free.shape), 90, -70
        frames = []
        for state in self._physics:
            data.qpos[:] = state[:15]
            mujoco.mj_forward(self._renderer.model, data)
            self._renderer.update_scene(data, camera)
            frames.append(self._renderer.render())
        return tuple(frames)

    def close_extras(self, **kwargs):
        if self._renderer is not None:
            self._renderer.close()

    # ------------------------------------------------------------------------------------------------ drawing
    def draw(self, ax, values=None):
        """The maze from above: walls grey, s0 red, goal green; `values` [S] as colours (default distance)."""
        (left, top), (right, bottom) = self.corner, self.far_corner
        ax.imshow(~self.free, cmap="Greys", vmin=0, vmax=1.6, interpolation="nearest",
                  extent=(left, right, bottom, top))
        ax.scatter(*self.truth_xy.T, c=self.distance[self.start_index] if values is None else values, s=5)
        if self.goal_xy is not None:
            ax.add_patch(Circle(self.goal_xy, GOAL_RADIUS, color="tab:green", alpha=0.35, lw=0))
        gridworld.mark_ends(ax, self, self.truth_xy)
        ax.set(aspect="equal", xticks=[], yticks=[])

    def draw_skills(self, path, policy, omega, steps):
        """`steps` of each skill from 12 places; policy(obs [n, 29], skill [n]) -> probabilities [n, 8, 5]."""
        order = np.argsort(self.distance[self.start_index], kind="stable")
        starts = self.truth_obs[order[np.linspace(0, len(order) - 1, 12).astype(int)]]
        traces = self.skill_traces(policy, len(omega), starts, steps)
        gridworld.draw_traces(path, self, [None] * len(omega), traces,
                              [f"delta = ({delta[0]:.2f}, {delta[1]:.2f})" for delta in omega])

    def skill_traces(self, policy, count, starts, steps):
        """xy [count, starts, steps + 1, 2] of every skill, sampled, from the states `starts` [m, 29]."""
        skill = np.repeat(np.arange(count), len(starts))
        env = AntMazeVec(self._maze, len(skill), 0)
        env.place(np.ones(len(skill), bool), np.tile(starts, (count, 1)))
        traces = [env.obs[:, :2]]
        for _ in range(steps):
            cumulative = policy(env.obs, skill).cumsum(-1)
            actions = (env.rng.random((len(skill), 8, 1)) > cumulative[..., :-1]).sum(-1)
            traces.append(env.move(actions)[:, :2])
        return np.stack(traces, axis=1).reshape(count, len(starts), -1, 2)


class AntMazeEnv(gridworld.GridWorldEnv):
    """One ant without a time limit: gymnasium.make adds it. Arguments as AntMazeVec without num_envs."""
    kind = AntMazeVec


for _id, _maze in (("AntMaze1", "antmaze1"), ("AntMaze2", "antmaze2"), ("AntMazeLarge", "antmaze-large")):
    gymnasium.register(f"TATC/{_id}-v0", entry_point=AntMazeEnv, vector_entry_point=AntMazeVec,
                       max_episode_steps=1000, kwargs={"maze": _maze})


# ------------------------------------------------------------------------------ every environment by its name
def check_environment(env, num_envs, name):
    """Refuses an environment that is not as README's "Your own environment" says, naming the first thing."""
    def observations(array, count):  # indices [count] below obs_size, or float32 [count, obs_size]
        if env.obs_scale is None:
            return array.shape == (count,) and array.dtype.kind in "iu" and not (array // env.obs_size).any()
        return (array.shape == (count, env.obs_size) and array.dtype == np.float32
                and np.isfinite(array).all())

    def scale(array):
        return array.shape == (env.obs_size,) and array.dtype == np.float32

    def moves():  # a step of all agents from s0, taken back
        state = env.get_state()
        env.place(np.ones(num_envs, bool), "s0")
        good = observations(env.move(np.zeros((num_envs, env.action_shape[0]), int)), num_envs)
        env.set_state(state)
        return good and observations(env.obs, num_envs)

    states = len(getattr(env, "truth_obs", ()))
    for what, fits in {
            "obs_size": lambda: whole(env.obs_size, 1), "num_envs": lambda: env.num_envs == num_envs,
            "action_shape": lambda: len(env.action_shape) == 2 and all(whole(n, 1) for n in env.action_shape),
            "obs_scale": lambda: env.obs_scale is None or scale(env.obs_scale),
            "phi_scale": lambda: env.phi_scale is None if env.obs_scale is None else scale(env.phi_scale),
            "obs": lambda: observations(env.obs, num_envs),
            "truth_obs": lambda: observations(env.truth_obs, states),
            "truth_xy": lambda: np.shape(env.truth_xy) == (states, 2),
            "start_index": lambda: whole(env.start_index, 0) and env.start_index < states,
            "num_cells": lambda: whole(env.num_cells, 1),
            "cell": lambda: env.cell(env.obs).dtype.kind in "iu" and all(
                not (env.cell(obs) // env.num_cells).any() for obs in (env.obs, env.truth_obs)),
            "distance": lambda: env.distance is None or (
                env.distance.shape == (states, states) and np.isfinite(env.distance).all()
                and env.distance[env.start_index].max() > 0),
            "fallen": lambda: env.fallen().shape == (num_envs,) and env.fallen().dtype == bool,
            "get_state, set_state": lambda: env.set_state(env.get_state()) is None,
            "move, place": moves}.items():
        try:
            good = fits()
        except Exception:  # missing, or of a type that does not even compare
            good = False
        if not good:
            raise UsageError(f'{name}: {what} is missing or not as README, "Your own environment", says')


def make_env(name, num_envs, seed):
    """--env of all scripts: a built-in maze, a text file, ant:FILE for ants in it, your FILE.py:FUNCTION."""
    if name in MAZES or name.startswith("ant:"):
        return AntMazeVec(name.removeprefix("ant:"), num_envs, seed)
    if ".py:" in name:
        path, function = name.rsplit(":", 1)
        text = gridworld.read_text(path)
        try:
            found = runpy.run_path(path)
            env = found[function](num_envs, seed) if function in found else None
            if env is not None:
                env.name = f"{function}-{gridworld.file_name(path, text)}"
        except (Exception, SystemExit) as error:  # whatever the file does
            raise UsageError(f"{name} failed with {type(error).__name__}: {error}; mend the file") from None
        if env is None:
            raise UsageError(f"{path} has no function {function}; define {function}(num_envs, seed), "
                             "which returns an environment")
        check_environment(env, num_envs, name)
        return env
    if name not in gridworld.MAZES and not Path(name).exists():
        known = ", ".join([*gridworld.MAZES, *MAZES])
        raise UsageError(f"unknown env {name!r}: not one of {known}, and no file; "
                         "also ant:FILE and FILE.py:FUNCTION")
    return gridworld.GridWorldVec(name, num_envs, seed)


# ------------------------------------------------------------------------------------------------------ speed
def bare_loop(model, num_ants, num_threads, seed):
    """mujoco.batch alone, from s0 with the usual noise -> (step(torques [N, 8]), states [N, 29])."""
    rng = np.random.default_rng(seed)
    batch = mujoco.batch.Batch(model, num_ants, num_threads)
    ctrl, states = batch.bind("ctrl"), batch.state[:, 1:30]
    states[:] = RESET_POSE
    states[:, :15] += rng.uniform(-0.1, 0.1, (num_ants, 15))
    states[:, 15:] += 0.1 * rng.standard_normal((num_ants, 14))

    def step(torques):
        ctrl[:] = torques
        batch.step(nstep=5)
    return step, states


def benchmark(maze, seed, rounds=7, seconds=0.3):
    """CPU microseconds per step of one ant, 32 ants on one thread, random actions -> {name: microseconds}.

    The contenders take turns, so that a busy machine slows all alike; the fastest round of each counts.
    """
    ours, rng = AntMazeVec(maze, 32, seed), np.random.default_rng(seed)
    index = rng.integers(0, 5, (100, 32, 8))
    torques = (index / 2 - 1).astype(np.float32)
    timed = {"antmaze.py": (ours.move, index),
             "mujoco.batch, same model": (bare_loop(ours.model, 32, 1, seed)[0], torques)}
    for name, build in (
            ("gymnasium Ant-v5, Sync (no maze)", lambda: gymnasium.make_vec("Ant-v5", 32, "sync")),
            ("gymnasium-robotics AntMaze_UMaze, Sync",
             lambda: gymnasium.make_vec("gymnasium_robotics:AntMaze_UMaze-v5", 32, "sync")),
            ("envpool Ant-v5 (no maze)", lambda: importlib.import_module("envpool").make_gymnasium(
                "Ant-v5", num_envs=32, num_threads=1, seed=seed))):
        try:
            envs = build()
            envs.reset()
        except Exception as error:  # a peer that is absent or of other versions must not stop the others
            print(f"{name}: skipped ({type(error).__name__}: {str(error).splitlines()[0]})")
        else:
            timed[name] = envs.step, torques
    cost = dict.fromkeys(timed, math.inf)
    for _ in range(rounds):
        for name, (step, actions) in timed.items():
            calls, begin = 0, time.process_time()
            while (spent := time.process_time() - begin) < seconds or calls == 0:
                step(actions[calls % 100])
                calls += 1
            cost[name] = min(cost[name], spent / calls / 32 * 1e6)
    return cost


# ------------------------------------------------------------------------------------------------------- main
@dataclass
class Args:
    maze: str = "antmaze1"
    """antmaze1, antmaze2, antmaze-large or a maze text file"""
    seed: int = 0
    """seed of the ants and of their random actions"""
    picture: str = "antmaze.png"
    """where the picture from above is written"""


def main(args):
    gridworld.check_ranges(args, {"seed": (0, 2**31)})
    gridworld.picture_path(args.picture)
    env = AntMazeVec(args.maze, 8, args.seed, start="uniform")
    goal = "none" if env.goal_index is None else f"{env.distance[env.start_index, env.goal_index]:.1f} away"
    print(f"{env.name}: {env.free.sum()} free blocks, {env.num_cells} cells, {len(env.truth_xy)} positional "
          f"states, goal {goal}, furthest cell {env.cell_distance.max():.1f}")
    rng, figure = np.random.default_rng(args.seed), Figure(figsize=(5, 5), layout="constrained")
    traces = np.stack([env.move(rng.integers(0, 5, (8, 8)))[:, :2] for _ in range(500)], 1)
    ax = figure.subplots()
    env.draw(ax)
    ax.plot(*traces.transpose(2, 1, 0), lw=1)
    ax.set_title(f"{env.name}: 500 random steps of 8 ants", fontsize=9)
    figure.savefig(args.picture, dpi=110)
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    gridworld.guarded(lambda: main(tyro.cli(Args)))

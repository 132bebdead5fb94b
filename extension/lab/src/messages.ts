// Made by `python -m speedlab_server.schema.typescript` from speedlab_server/schema; a test compares both.

export const VERSION = 1 as const;
export const CATEGORIES = ["parameters", "gradients", "master_weights", "optimizer_moments", "activations", "communication_buffers", "other_framework", "outside_framework"] as const;
export const PLACES = ["device", "host", "disk"] as const;
export const COLUMNS = ["step", "loss_low", "loss_high", "smoothed_loss", "learning_rate", "grad_norm", "tokens_per_second", "flops_per_second", "seconds", "data", "forward", "backward", "communication", "offload", "optimizer"] as const;
export const SMOOTHING = 0.9 as const;
export const SMOOTHINGS = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999] as const;
export const CONTROL_WORDS = ["pause", "resume", "step", "stop", "save", "reshape"] as const;
export const CLUSTER_WORDS = ["cancel", "stop", "remove"] as const;

/** Why something could not be answered, and what to do. */
export interface Problem {
  type: "Problem";
  version: number;
  text: string;
}

/** A cluster, in a list. */
export interface ClusterSummary {
  id: string;
  name: string;
  state: "damaged" | "elsewhere" | "ended" | "failed" | "running" | "starting";
  engines: number;
  host: string;
  hosts: string[];
  link: string;
  started: number;
  text: string;
}

/** Every cluster of this person. */
export interface Clusters {
  type: "Clusters";
  version: number;
  clusters: ClusterSummary[];
}

/** Where a rank runs. */
export interface Device {
  kind: string;
  name: string;
  capacity_bytes: number;
  free_bytes: number;
  cores: number;
}

/** A rank of a cluster, as it is now. */
export interface Rank {
  rank: number;
  state: string;
  pid: number;
  rss_bytes: number;
  host: string;
  device: Device | null;
  cpu_share: number | null;
  gpu_share: number | null;
}

/** Bytes of a rank at the peak of its last step, by place (PLACES) and category (CATEGORIES). */
export interface RankMemory {
  rank: number;
  step: number;
  held: number[][];
  capacity: number[];
}

/** One cluster. */
export interface Cluster {
  type: "Cluster";
  version: number;
  cluster: ClusterSummary;
  ranks: Rank[];
  memory: RankMemory[];
  runs: string[];
  problem: string;
}

/** A run, in a list. */
export interface RunSummary {
  id: string;
  name: string;
  state: "damaged" | "failed" | "finished" | "paused" | "running" | "starting" | "stopped";
  step: number;
  steps: number;
  loss: number | null;
  tokens_per_second: number | null;
  seconds_left: number | null;
  cluster: string;
  engines: number;
  updated: number;
  text: string;
  problem: string;
}

/** The runs of this person, the newest first. */
export interface Runs {
  type: "Runs";
  version: number;
  runs: RunSummary[];
}

/** One run. */
export interface Run {
  type: "Run";
  version: number;
  run: RunSummary;
  ranks: number[];
  config: Record<string, unknown>;
  memory: RankMemory[];
}

/** Step records of a rank in buckets of `stride` steps: a page keeps its first `keep` points and appends these. */
export interface Records {
  type: "Records";
  version: number;
  run: string;
  rank: number;
  generation: number;
  stride: number;
  keep: number;
  columns: Record<string, (number | null)[]>;
  heldout: ([number, number | null])[];
}

/** Something that happened to a run. */
export interface RunEvent {
  kind: string;
  step: number;
  time: number;
  text: string;
  command: number | null;
  details: Record<string, unknown>;
}

/** Events of a run: a page keeps its first `keep` ones and appends these; there are `total`. */
export interface Events {
  type: "Events";
  version: number;
  run: string;
  keep: number;
  total: number;
  events: RunEvent[];
}

/** A state of a parameter, as far as a rank holds it. */
export interface TensorRow {
  name: string;
  unit: string;
  state: string;
  shape: string;
  here: string;
  owner: string;
  form: string;
  bytes: number;
}

/** The tensors in a segment of the memory bars: what `rank` holds of `category` at `place`, the largest first. */
export interface Tensors {
  type: "Tensors";
  version: number;
  rank: number;
  category: string;
  place: string;
  step: number;
  measured_bytes: number | null;
  tensor_bytes: number;
  count: number;
  rows: TensorRow[];
  text: string;
}

/** What a rank has printed. */
export interface RankLines {
  rank: number;
  lines: string[];
  skipped: boolean;
}

/** What ranks have printed. `cursor` goes back as `after` with the next question. */
export interface Output {
  type: "Output";
  version: number;
  ranks: RankLines[];
  cursor: string;
}

/** A notebook that comes with SpeedLab. */
export interface Notebook {
  type: "Notebook";
  version: number;
  name: string;
  content: Record<string, unknown>;
}

/** A control word is on its way; the event whose `command` is `number` answers it. */
export interface WordGiven {
  type: "WordGiven";
  version: number;
  run: string;
  word: string;
  number: number;
}

/** A word was carried out; a start (`word` is "start") goes on, and the list of clusters tells how. */
export interface ClusterWordGiven {
  type: "ClusterWordGiven";
  version: number;
  cluster: string;
  word: string;
}

/** A Python that can start a cluster. */
export interface StartPlace {
  id: string;
  name: string;
}

/** With what a page can start a cluster, the server's own Python first. `problem`: why with nothing. */
export interface Places {
  type: "Places";
  version: number;
  places: StartPlace[];
  problem: string;
}

/** What is new of a run; null is nothing new. */
export interface RunNews {
  id: string;
  status: RunSummary | null;
  records: Records | null;
  events: Events | null;
  memory: RankMemory[] | null;
  problem: string | null;
}

/** What ranks have printed since; null is nothing new. */
export interface OutputNews {
  kind: "clusters" | "runs";
  id: string;
  output: Output | null;
  problem: string | null;
}

/** To a page: all that is new, at most ten times a second. */
export interface Tick {
  type: "Tick";
  version: number;
  runs: RunNews[];
  outputs: OutputNews[];
  lists_problem: string | null;
  all_runs: RunSummary[] | null;
  all_clusters: ClusterSummary[] | null;
}

/** A figure of plotly's, but that arrays are {"f32": number of a buffer}. */
export interface Figure {
  data: (Record<string, unknown>)[];
  layout: Record<string, unknown>;
}

/** What stands above the figures. */
export interface HeadLine {
  text: string;
  state: string;
  mark: string;
  note: string;
}

/** All figures of a run. `states`: whether to begin with the model states alone; null while nothing is known. */
export interface Keyframe {
  type: "Keyframe";
  version: number;
  seq: number;
  figures: Record<string, Figure>;
  head: HeadLine;
  states: boolean | null;
  buffers: number[];
}

/** A run among others; its number, from 0 on, is its place in the list. */
export interface ComparedRun {
  name: string;
  colours: string[];
  state: string;
  mark: string;
  text: string;
  problem: string;
}

/** Something that has a value in each run; empty in one that has none. */
export interface ComparedRow {
  name: string;
  values: string[];
}

/** What stands beside the figures: the runs, what each has come to, the settings in which they differ. */
export interface Compared {
  runs: ComparedRun[];
  facts: ComparedRow[];
  settings: ComparedRow[];
  note: string;
}

/** All figures of several runs. Curves and marks of a run bear its number, as `legendgroup` or `name`. */
export interface Comparison {
  type: "Comparison";
  version: number;
  seq: number;
  figures: Record<string, Figure>;
  compared: Compared;
  buffers: number[];
}

/** A figure is drawn anew. */
export interface FigurePart {
  part: "figure";
  figure: string;
  data: (Record<string, unknown>)[];
  layout: Record<string, unknown>;
}

/** Curves grow: for each of `traces` so many `points`, in the buffer first their x and then their y. */
export interface ExtendPart {
  part: "extend";
  figure: string;
  traces: number[];
  points: number[];
  buffer: number;
}

/** Heights of all bars, one trace after another, and the words of the annotations. */
export interface BarsPart {
  part: "bars";
  figure: string;
  notes: string[];
  buffer: number;
}

/** Events, on every axis of steps. */
export interface MarksPart {
  part: "marks";
  shapes: (Record<string, unknown>)[];
  annotations: (Record<string, unknown>)[];
}

/** The line above the figures. */
export interface HeadPart {
  part: "head";
  text: string;
  state: string;
  mark: string;
  note: string;
}

/** The same, in the place of what was there. */
export interface ComparedPart {
  part: "compared";
  runs: ComparedRun[];
  facts: ComparedRow[];
  settings: ComparedRow[];
  note: string;
}

/** What is new since the Keyframe, Comparison or Changes whose `seq` is one less. */
export interface Changes {
  type: "Changes";
  version: number;
  seq: number;
  parts: (FigurePart | ExtendPart | BarsPart | MarksPart | HeadPart | ComparedPart)[];
  buffers: number[];
}

/** From a kernel, of a widget with several views: what is for the one alone that smooths by a share of its own. From then on that view takes no other drawing. */
export interface OwnDrawing {
  type: "OwnDrawing";
  version: number;
  view: string;
  drawn: Keyframe | Changes;
}

/** What a page asks of a run. Numbers and texts in `arguments` are those of the run's own methods. */
export interface Word {
  word: string;
  arguments?: Record<string, unknown>;
}

/** A cluster that a page wants, from the server's machine. */
export interface Start {
  name: string;
  place: string;
  engines?: number | null;
  hosts?: string;
}

/** What a page wants to hear of a run, and what it has of it already (see Records and Events). */
export interface Watch {
  id: string;
  parts: ("events" | "memory" | "records" | "status")[];
  generation?: number;
  stride?: number;
  after?: number;
  events_after?: number;
  points?: number;
}

/** What ranks print: those of a cluster, or of the one that holds a run. */
export interface WatchOutput {
  kind: "clusters" | "runs";
  id: string;
  after?: string;
}

/** From a page: what it wants to hear from now on, in the place of what it heard. Hidden, it wants nothing. */
export interface Subscribe {
  type: "Subscribe";
  version: number;
  runs?: Watch[];
  outputs?: WatchOutput[];
  lists?: boolean;
}

/** From a page: how it wants a run to be drawn from now on. Hidden, it is not watching. */
export interface Draw {
  type: "Draw";
  version: number;
  watching?: boolean;
  view?: string;
  keyframe?: boolean;
  step?: number | null;
  smoothing?: number | null;
}

/** From a page to a kernel, as it asks a server by `runs/<id>/tensors`: what is in a segment of the memory bars. */
export interface Segment {
  type: "Segment";
  version: number;
  rank: number;
  category: string;
  place: string;
}

export type Answer = Problem | Clusters | Cluster | Runs | Run | Records | Events | Tensors | Output | Notebook | WordGiven | ClusterWordGiven | Places | Tick | Keyframe | Comparison | Changes | OwnDrawing;
export type Question = Word | Start | Subscribe | Draw | Segment;

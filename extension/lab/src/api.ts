import type {
  Answer,
  Cluster,
  Clusters,
  ClusterWordGiven,
  Events,
  Notebook,
  Places,
  Run,
  Runs,
  Segment,
  Start,
  Tensors,
  Word,
  WordGiven
} from './messages';
import { VERSION } from './messages';

/** Something that the server did not do, with what to do about it. */
export class ProblemError extends Error {
  constructor(
    text: string,
    /** Of HTTP; 0 where no answer came. */
    readonly status: number
  ) {
    super(text);
  }
}

/** Where the answers come from: an address below `<base>/speedlab/api/`, asked as the rest of the page asks. */
export type Request = (way: string, init: RequestInit) => Promise<Response>;

/** Whose output: a cluster's, or that of the cluster which holds a run. */
export type Printer = { kind: 'clusters' | 'runs'; id: string };

/** The server extension's REST side. Every way raises ProblemError. */
export class Api {
  constructor(private readonly request: Request) {}

  clusters = () => this.ask<Clusters>('Clusters', 'clusters');
  cluster = (id: string) => this.ask<Cluster>('Cluster', `clusters/${encodeURIComponent(id)}`);
  runs = () => this.ask<Runs>('Runs', 'runs');
  run = (id: string) => this.ask<Run>('Run', `runs/${encodeURIComponent(id)}`);
  events = (id: string) => this.ask<Events>('Events', `runs/${encodeURIComponent(id)}/events`);
  notebook = (name: string) => this.ask<Notebook>('Notebook', `notebooks/${encodeURIComponent(name)}`);

  /** What is in a segment of a run's memory bars. */
  tensors(run: string, { rank, category, place }: Pick<Segment, 'rank' | 'category' | 'place'>): Promise<Tensors> {
    const query = new URLSearchParams({ rank: String(rank), category, place });
    return this.ask('Tensors', `runs/${encodeURIComponent(run)}/tensors?${query.toString()}`);
  }

  /** Give a control word to a run. */
  give(run: string, word: Word): Promise<WordGiven> {
    const way = `runs/${encodeURIComponent(run)}/words`;
    return this.ask('WordGiven', way, { method: 'POST', body: JSON.stringify(word) });
  }

  /** With which Pythons a cluster can be started. */
  places = () => this.ask<Places>('Places', 'places');

  /** Start a cluster in the background. */
  start = (start: Start) =>
    this.ask<ClusterWordGiven>('ClusterWordGiven', 'clusters', { method: 'POST', body: JSON.stringify(start) });

  /** One of CLUSTER_WORDS; answered when it is done. */
  tellCluster(id: string, word: string): Promise<ClusterWordGiven> {
    const way = `clusters/${encodeURIComponent(id)}/words`;
    return this.ask('ClusterWordGiven', way, { method: 'POST', body: JSON.stringify({ word }) });
  }

  private async ask<Kind extends Answer>(type: Kind['type'], way: string, init: RequestInit = {}): Promise<Kind> {
    const headers = { 'X-SpeedLab-Version': String(VERSION), 'Content-Type': 'application/json' };
    let response: Response;
    try {
      response = await this.request(way, { ...init, headers });
    } catch {
      throw new ProblemError("Jupyter's server does not answer; is it still running?", 0);
    }
    const answer: unknown = await response.json().catch(() => null);
    if (!response.ok) throw new ProblemError(problemText(response.status, answer), response.status);
    if (!isAnswer<Kind>(answer, type)) {
      throw new ProblemError('Jupyter’s server gave an answer that is none of SpeedLab’s; reload the page', 0);
    }
    return answer;
  }
}

function isAnswer<Kind extends Answer>(answer: unknown, type: Kind['type']): answer is Kind {
  return typeof answer === 'object' && answer !== null && 'type' in answer && answer.type === type;
}

/** What an answer that is none says, in words that tell what to do. */
function problemText(status: number, answer: unknown): string {
  const field = (name: string) => {
    const value: unknown = typeof answer === 'object' && answer !== null ? Reflect.get(answer, name) : null;
    return typeof value === 'string' ? value : '';
  };
  const text = field('type') === 'Problem' ? field('text') : '';
  if (text && status !== 403) return text;
  if (status === 404) {
    return (
      "Jupyter's server has no SpeedLab: enable it with `jupyter server extension enable speedlab_server` and start " +
      'the server again'
    );
  }
  // A folder's rights are told in the server's words; Jupyter's own refusal says no more than "Forbidden".
  if (status === 401 || status === 403) {
    return text.includes(' ') ? text : 'this user has no right to SpeedLab on this server; sign in, or ask for it';
  }
  return `Jupyter's server could not answer (${status}); its log has details`;
}

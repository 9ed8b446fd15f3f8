/** The items of a conversation: a tree, of which one branch is shown. */

export class Tree {
  items = new Map();
  #children = new Map([[null, []]]); // ids by parent, in the order in which they came
  #streams = new Map();
  #branch;

  constructor(items, head = null, answers = {}) {
    this.head = head;
    this.answers = answers; // facts by the id of the stream
    for (const item of items) {
      this.items.set(item.id, item);
      this.#children.set(item.id, []);
      if (item.stream_id && item.type === "message") this.#streams.set(item.stream_id, item);
    }
    for (const item of items) this.#children.get(this.items.has(item.parent_id) ? item.parent_id : null).push(item.id);
    this.#branch = this.#pathTo(head);
  }

  /** The items that are shown, from the first on. */
  get branch() {
    return this.#branch;
  }

  get last() {
    return this.#branch.at(-1) ?? null;
  }

  byStream(streamId) {
    return this.#streams.get(streamId) ?? null;
  }

  /** Items that follow the same one, this one among them. */
  siblings(item) {
    return this.#children.get(this.items.has(item.parent_id) ? item.parent_id : null).map((id) => this.items.get(id));
  }

  /** Where a branch ends that leads through an item: each time the last child. */
  leafBelow(id) {
    let leaf = id;
    while (this.#children.get(leaf).length) leaf = this.#children.get(leaf).at(-1);
    return leaf;
  }

  withHead(head) {
    return new Tree([...this.items.values()], head, this.answers);
  }

  #pathTo(id) {
    const path = [];
    for (let item = this.items.get(id); item; item = this.items.get(item.parent_id)) path.push(item);
    return path.reverse();
  }
}

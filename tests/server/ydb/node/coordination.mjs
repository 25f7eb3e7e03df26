// A program in Node.js with YDB's own driver, told what to do line by line;
// tests/server/ydb/test_node.py is its other end.
//
// The driver discovers, connects, pings and shows the token. What its makers have on top of it for
// coordination nodes is not in npm's registry: the messages are said here as they are.

import { createInterface } from "node:readline";
import { create } from "@bufbuild/protobuf";
import { CoordinationServiceDefinition, SessionRequestSchema } from "@ydbjs/api/coordination";
import { AccessTokenCredentialsProvider } from "@ydbjs/auth/access-token";
import { Driver } from "@ydbjs/core";

const [address, token] = process.argv.slice(2);
const credentialsProvider = new AccessTokenCredentialsProvider({ token });
const driver = new Driver(address, { credentialsProvider });
const ALL = 2n ** 64n - 1n;

const say = (what) => process.stdout.write(JSON.stringify(what) + "\n");

// What is to be said, as the stream takes it.
const outgoing = [];
let wake = () => {};
let over = false;
const send = (kind, value) => {
  outgoing.push(create(SessionRequestSchema, { request: { case: kind, value } }));
  wake();
};
async function* requests() {
  while (!over || outgoing.length > 0) {
    if (outgoing.length === 0) await new Promise((resolve) => (wake = resolve));
    else yield outgoing.shift();
  }
}

async function session(client, path) {
  send("sessionStart", { path, timeoutMillis: 30000n, description: "in Node.js", seqNo: 1n });
  for await (const { response } of client.session(requests())) {
    const { case: kind, value } = response;
    if (kind === "ping") send("pong", { opaque: value.opaque });
    else if (kind === "sessionStarted") say({ kind, known: value.sessionId > 0n });
    else if (kind === "describeSemaphoreResult") {
      const { owners, waiters } = value.semaphoreDescription;
      say({ kind, owners: owners.length, waiters: waiters.length });
    } else say({ kind, acquired: value.acquired, released: value.released, status: value.status });
    if (kind === "sessionStopped") over = true;
  }
  say({ kind: "ended" });
}

await driver.ready();
const client = driver.createClient(CoordinationServiceDefinition);
const commands = {
  node: async ({ path }) => {
    const { operation } = await client.createNode({ path, config: {} });
    say({ kind: "created", status: operation.status });
  },
  session: ({ path }) => void session(client, path),
  acquire: ({ name }) =>
    send("acquireSemaphore", { reqId: 1n, name, count: ALL, timeoutMillis: ALL, ephemeral: true }),
  release: ({ name }) => send("releaseSemaphore", { reqId: 2n, name }),
  describe: ({ name }) =>
    send("describeSemaphore", { reqId: 3n, name, includeOwners: true, includeWaiters: true }),
  stop: () => send("sessionStop", {}),
};
say({ kind: "ready" });
for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...how } = JSON.parse(line);
  await commands[command](how);
}
driver.close();

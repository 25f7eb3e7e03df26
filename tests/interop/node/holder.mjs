// A program in Node.js, told what to do line by line; tests/interop/test_node.py is its other end.
//
// It uses effect-distributed-lock itself. What exclusive-lock does, which is in no registry, it
// does by the same commands.

import { createInterface } from "node:readline";
import { DistributedSemaphore, RedisBacking } from "effect-distributed-lock";
import { Effect, Exit, Schedule, Scope } from "effect";
import { Redis } from "ioredis";

const redis = new Redis(process.argv[2]);
const layer = RedisBacking.layer(redis);
const scopes = new Map();

const say = (what) => process.stdout.write(JSON.stringify(what) + "\n");

const make = ({ key, limit, poll }) =>
  DistributedSemaphore.make(key, {
    limit,
    ttl: "30 seconds",
    acquireRetryPolicy: Schedule.spaced(`${poll ?? 100} millis`),
  });

const inside = (counter) =>
  Effect.promise(async () => {
    const others = await redis.incr(counter);
    await new Promise(setImmediate);
    await redis.decr(counter);
    return others;
  });

const commands = {
  // Take permits and keep them until they are given back.
  async take({ name, permits, identifier, acquiredExternally, ...how }) {
    const scope = Effect.runSync(Scope.make());
    const taking = make(how).pipe(
      Effect.flatMap((semaphore) => semaphore.take(permits, { identifier, acquiredExternally })),
      Effect.provide(layer),
      Scope.extend(scope),
    );
    await Effect.runPromise(taking);
    scopes.set(name, scope);
  },

  async give({ name }) {
    await Effect.runPromise(Scope.close(scopes.get(name), Exit.void));
    scopes.delete(name);
  },

  async count(how) {
    const counting = make(how).pipe(
      Effect.flatMap((semaphore) => semaphore.currentCount),
      Effect.provide(layer),
    );
    return Effect.runPromise(counting);
  },

  // Take a permit again and again; returns how many held one at the same time, at the most.
  async contend({ rounds, counter, ...how }) {
    const once = make(how).pipe(
      Effect.flatMap((semaphore) => semaphore.withPermits(1)(inside(counter))),
      Effect.provide(layer),
    );
    let most = 0;
    for (let round = 0; round < rounds; round++) {
      most = Math.max(most, await Effect.runPromise(once));
    }
    return most;
  },

  // The same with the commands of exclusive-lock.
  async exclusive({ rounds, counter, key }) {
    let most = 0;
    for (let round = 0; round < rounds; ) {
      if ((await redis.set(key, "1", "PX", 3000, "NX")) === "OK") {
        most = Math.max(most, await Effect.runPromise(inside(counter)));
        await redis.pexpire(key, 3000);
        await redis.del(key);
        round++;
      }
      await new Promise((resolve) => setTimeout(resolve, 2));
    }
    return most;
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { number, command, ...how } = JSON.parse(line);
  commands[command](how).then(
    (result) => say({ number, result }),
    (error) => say({ number, error: String(error) }),
  );
}
redis.disconnect();

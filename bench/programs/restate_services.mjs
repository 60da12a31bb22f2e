// The only feature of node 22 that Restate's SDK needs.
Promise.withResolvers ??= () => {
  let resolve, reject;
  const promise = new Promise((yes, no) => { resolve = yes; reject = no; });
  return { promise, resolve, reject };
};
const restate = await import("@restatedev/restate-sdk");

/** A handler with `count` durable steps. */
const steps = (count) => async (ctx, input) => {
  let value = input;
  for (let at = 0; at < count; at++) {
    value = await ctx.run(`step ${at}`, () => ({ message: `Hello, ${value.name ?? value.message}!` }));
  }
  return value;
};

const service = restate.service({ name: "steps", handlers: { one: steps(1), three: steps(3), nine: steps(9) } });
await restate.serve({ services: [service], port: Number(process.env.PORT) });

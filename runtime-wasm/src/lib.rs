//! The wasm host: engine, component cache, pool, host capabilities, limits.

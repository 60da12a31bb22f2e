//! The wasm host: it makes components ready, makes instances of them, and lets requests and pods run in
//! them, within limits.
//!
//! **Belongs here:** everything that names wasmtime. The engines and their pools ([`config`], `engine`),
//! compiling ahead of time (for a server in
//! processes of their own) and mapping what was compiled (`compile`, `cache`), calls (`function`, `call`, `record`),
//! how guests share the processor (`cpu`), what a guest may ask of its host (`guest`, `capability`), pods (`pods`), the
//! memories and stacks that instances live in (`pool`).
//!
//! **Does not belong here:** routes, queues, when to scale (the gateway's), restarts (the kubelet's), the
//! API. Nothing here knows of an API object.
//!
//! Start reading at [`WasmHost`], then `function` for the request path.

mod cache;
mod call;
mod capability;
mod compile;
pub mod config;
mod cpu;
mod engine;
mod failure;
mod function;
mod guest;
mod host;
mod machine;
mod metrics;
mod pods;
mod pool;
mod record;
mod reuse;
mod slots;

pub use compile::{CompileProgress, run_worker as compile_worker};
pub use config::{CompileIn, Config};
pub use host::{CreateError, WasmHost};
pub use mayfly_runtime::component::{ComponentRefused, ComponentReport, World, inspect};

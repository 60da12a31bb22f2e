//! The wasm host: compiles components, instantiates them, and runs requests and pods in the instances, within limits.
//!
//! **Belongs here:** everything that names wasmtime. The engines and their pools ([`config`], `engine`), compiling
//! ahead of time (in separate processes for a server) and mapping compiled components (`compile`, `cache`), calls
//! (`function`, `call`, `record`), processor sharing between guests (`cpu`), the interfaces that a guest may import
//! (`guest`, `capability`), pods (`pods`), the memories and stacks of instances (`pool`).
//!
//! **Does not belong here:** routes, queues, scaling (the gateway), restarts (the kubelet), API objects.
//!
//! Start reading at [`WasmHost`], then `function` for the request path.

#![warn(missing_debug_implementations)]

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
mod program_pages;
mod record;
mod reuse;
mod slots;

pub use compile::{CompileProgress, run_worker as compile_worker};
pub use config::{CompileIn, Config};
pub use host::{HostCreateError, WasmHost};
pub use mayfly_runtime::component::{ComponentRefused, ComponentReport, ComponentWorld, inspect};
pub use program_pages::release_program_pages;

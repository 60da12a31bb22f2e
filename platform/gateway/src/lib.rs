//! The request path: routes, admission, traffic, demand.
//!
//! **Belongs here:** the listener for functions (HTTP/1.1 and h2c on one port); the immutable table that
//! says which function a request is for ([`routes`]); the bound and the queue of each revision
//! ([`admission`]); the call into the host in the same process ([`proxy`]); what a refused request is told
//! ([`refusal`]); how many replicas each revision should have ([`autoscale`]).
//!
//! **Does not belong here:** running a component (a [`FunctionHost`](mayfly_runtime::FunctionHost) does),
//! placing pods, writing any object but the `replicas` of a revision's ReplicaSet. No request waits for
//! the API: with the API away, routes stay as they were and functions keep answering.
//!
//! Start reading at [`gateway`], then [`proxy`].

pub mod config;
pub mod function_services;
mod gateway;
pub mod refusal;

mod access_log;
mod admission;
mod autoscale;
mod body;
mod headers;
mod ingress;
mod invocations;
mod listen;
mod load;
mod metrics;
mod pods;
mod proxy;
mod rewrite;
mod routes;
mod target;

pub use body::ResponseBody;
pub use config::Config;
pub use gateway::{CreateError, Deps, Drained, Gateway, GatewayHandle, HttpsDeps};
pub use invocations::{HEADER_INVOCATION, HEADER_INVOCATION_ID, INVOCATION_BYTES_MAX, InvocationQueue};
pub use refusal::{Code, Refusal};
pub use routes::HEADER_TAG;

//! The request path: routes, admission, traffic, demand.
//!
//! **Belongs here:** the listener for functions (HTTP/1.1 and h2c on one port); the immutable table that maps requests
//! to functions ([`routes`]); the concurrency limit and the queue of each revision ([`admission`]); the call into the
//! host in the same process ([`proxy`]); the responses to refused requests ([`refusal`]); the number of replicas of
//! each revision ([`autoscale`]); passing asynchronous invocations to their queue ([`invocations`]); requests between the
//! gateways of a cluster's nodes ([`nodes`]).
//!
//! **Does not belong here:** running a component (a [`FunctionHost`](mayfly_runtime::FunctionHost) does), placing pods,
//! writing any object but the `replicas` of a revision's ReplicaSet. No request waits for the API: while the API is
//! unreachable, routes are unchanged and functions answer.
//!
//! Start reading at [`gateway`], then [`proxy`].

#![warn(missing_debug_implementations)]

pub mod config;
pub mod function_services;
mod gateway;
pub mod refusal;

mod access_log;
mod admission;
mod autoscale;
mod body;
mod deadline_body;
mod headers;
mod ingress;
mod invocations;
mod listen;
mod load;
mod metrics;
mod nodes;
mod pods;
mod proxy;
mod rewrite;
mod routes;
mod run;
mod target;
mod unread_body;

pub use body::ResponseBody;
pub use config::Config;
pub use gateway::{Drained, Gateway, GatewayCreateError, GatewayDeps, GatewayHandle, HttpsDeps};
pub use invocations::{HEADER_INVOCATION, HEADER_INVOCATION_ID, INVOCATION_BYTES_MAX, InvocationQueue};
pub use nodes::{GatewayRole, LeaderCaller, NodeCallError, NodeCallFuture, NodeCaller, NodeRequests};
pub use refusal::{Refusal, RefusalCode};
pub use routes::HEADER_TAG;

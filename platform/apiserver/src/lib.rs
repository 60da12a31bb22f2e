//! The Kubernetes HTTP API over the store, for `kubectl`, `kube` and every other Kubernetes client.
//!
//! **Belongs here:** the served kinds ([`registry`], a row each), the verbs, patches, printing, discovery and OpenAPI;
//! authentication, authorization by roles ([`rbac`]) and admission; the allocation of cluster IPs and node ports; the
//! upload of artifacts, the forwarding of logs and measurements from nodes; the trait `KindView` for kinds that are
//! stored by other components.
//!
//! **Does not belong here:** anything that reacts to objects. Three exceptions, because they are part of the meaning of
//! a verb: the contents of a deleted namespace are deleted here, the rules of aggregated cluster roles are computed
//! here, and the standard namespaces, roles and classes are created at the start.
//!
//! Start reading at [`ApiServer`], then `handler.rs` (the handling of a request), `registry.rs` (a kind's row) and
//! `verbs/`.

#![warn(missing_debug_implementations)]

mod access;
mod admission;
mod api_endpoint;
mod artifacts;
mod audit;
mod bootstrap_tokens;
mod call;
mod certificates;
mod compaction;
mod compression;
mod computed;
mod config;
mod custom;
mod decode;
mod discovery;
mod etag;
mod event_objects;
mod eviction;
mod expressions;
mod flow_bootstrap;
mod handler;
mod health;
mod issuer;
mod logs;
mod managed;
mod meta;
mod metrics;
mod namespaces;
mod negotiate;
mod object;
mod openapi;
mod patch;
mod pki;
mod protobuf;
mod proxy;
mod rbac;
mod registry;
mod render;
mod request;
mod reviews;
mod schema;
mod selection;
mod serve;
mod server;
mod services;
mod status;
mod streams;
mod subresources;
mod tokens;
mod usage;
mod verbs;
mod views;
mod yaml;

pub use access::User;
pub use audit::{Audit, AuditError, AuditPolicyError};
pub use bootstrap_tokens::BootstrapToken;
pub use certificates::{AuthorityError, ClientAuthority};
pub use config::{ApiServerDeps, Clock, Config, FunctionConnector, Inspector, NodeConnector, NodeError};
pub use pki::{Identity, NodeClientCertificate, PkiError, ServingCertificate, SignError};
pub use server::{ApiServer, ServerStartError};
pub use services::{InvalidNetwork, ServiceNetwork, ServiceNetworks};
pub use status::{ApiError, Cause, Details};
pub use views::{KindView, ViewChange, ViewError, ViewEvent, ViewPage, ViewQuery};

//! The client side of a node's joining: a machine with a token becomes a node with certificates of the cluster.
//!
//! ```text
//! token ──▶ GET /cacerts, not verified ──▶ hash = that of the token? ──▶ the cluster's CA
//!       ──▶ request of a client certificate, as the token's user      ──▶ client.crt, client.key
//!       ──▶ request of a serving certificate, as system:node:NAME     ──▶ serving.crt, serving.key
//! ```
//! The results are kept in a folder, so that a later start needs neither the token nor the server, and renewed while
//! the node runs.
//!
//! **Belongs here:** the format of tokens, CertificateSigningRequests of nodes and the wait for their certificates,
//! the folder of credentials, clients of the API server made from them, renewal.
//! **Does not belong here:** the authentication of tokens and `/cacerts` (`mayfly-apiserver`), the approval of requests
//! (`mayfly-controllers`), the link from the server to a node's agent, the node itself. Start at [`join`].
//!
//! The requests are those of upstream's kubelet (`pkg/kubelet/certificate`), so that the server may be any API server
//! that also serves `/cacerts` (k3s, for example).

#![warn(missing_docs, missing_debug_implementations)]

mod certificates;
mod config;
mod credentials;
mod error;
mod folder;
mod obtain;
mod renew;
mod request;
mod token;

pub use config::JoinConfig;
pub use credentials::{NodeCredentials, rotating_client};
pub use error::JoinError;
pub use obtain::join;
pub use renew::renew;
pub use token::{CaHash, InvalidToken, JoinToken};

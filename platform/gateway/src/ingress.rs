//! Ingresses: hosts and paths that lead to Services and functions.
//!
//! [`plan`] builds the table from the objects, purely; [`owner`] keeps it up to date; [`forward`] forwards requests to
//! the endpoints of a Service; [`certificates`] selects certificates by host; [`spin`] describes the route to
//! components of Spin applications. A backend that is a function, or a Service over one, is served like the function's
//! own routes, including its queue, traffic split and autoscaling.

pub(crate) mod certificates;
pub(crate) mod forward;
pub(crate) mod owner;
pub(crate) mod plan;
mod spin;

pub(crate) use plan::{IngressBackend, IngressTable};
pub(crate) use spin::SpinRoute;

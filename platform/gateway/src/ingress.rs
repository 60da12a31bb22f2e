//! Ingresses: hosts and paths that lead to Services and functions.
//!
//! [`plan`] makes the table from the objects, purely; [`owner`] keeps it as they are; [`forward`] passes requests on to
//! the endpoints of a Service; [`certificates`] has the certificates of their hosts; [`spin`] tells components of Spin
//! applications their route. A backend that is a function, or a Service over one, is answered as the function's own
//! routes are: its queue, traffic split and autoscaling included.

pub(crate) mod certificates;
pub(crate) mod forward;
pub(crate) mod owner;
pub(crate) mod plan;
mod spin;

pub(crate) use plan::{IngressBackend, IngressTable};
pub(crate) use spin::SpinRoute;

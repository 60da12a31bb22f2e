//! The routing of requests to functions and revisions.
//!
//! ```text
//!   informers ──dirty keys──▶ owner (one task) ──plan──▶ Route ──▶ Table ──▶ requests
//! ```
//!
//! [`plan`] computes a function's route from objects alone; [`owner`] publishes it; [`table`] holds all routes,
//! immutable and lock-free for readers; [`route`] chooses a revision, and [`sticky`] keeps a client on it; [`place`]
//! parses the target from a request.

pub(crate) mod owner;
pub(crate) mod place;
mod plan;
mod pods;
mod route;
mod sticky;
mod table;

pub use self::route::HEADER_TAG;
pub(crate) use self::{
    owner::Owner,
    place::{RoutePlace, comparable_path, host_of, with_unreserved_decoded},
    route::FunctionRoute,
    sticky::SetCookie,
    table::{FoundRoute, RouteTable},
};

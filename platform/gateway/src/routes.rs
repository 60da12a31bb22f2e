//! Which function a request is for.
//!
//! ```text
//!   informers ──dirty keys──▶ owner (one task) ──plan──▶ Route ──▶ Table ──▶ requests
//! ```
//!
//! [`plan`] says what a function's route should be, from objects alone; [`owner`] makes it so; [`table`]
//! holds all routes, immutable and without locks for those who read; [`route`] chooses a revision, and
//! [`sticky`] keeps a visitor with it; [`place`] reads from a request where it wants to go.

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
    place::{RoutePlace, host_of, plainly},
    route::FunctionRoute,
    sticky::SetCookie,
    table::{FoundRoute, RouteTable},
};

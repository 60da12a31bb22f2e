//! Requests, responses, bodies, and the client for outbound requests.
//!
//! The same [`Request`] is received by a handler and sent to other servers; the same [`Response`] is received from
//! other servers and returned by a handler. So this is a proxy:
//!
//! ```no_run
//! # use mayfly::{Request, Response};
//! #[mayfly::http]
//! async fn proxy(_request: Request) -> Result<Response, mayfly::Error> {
//!     Ok(mayfly::http::get("https://api.example.com/prices").await?)
//! }
//! ```
//!
//! Its body is streamed without being held in memory. Outbound requests are denied unless the function's `egress` lists
//! their destination.

mod body;
mod client;
mod error;
mod headers;
mod method;
mod query;
mod request;
mod response;

pub use body::{BODY_BYTES_MAX, Body, BodyWriter};
pub use client::{get, post, send};
pub use error::{HttpError, HttpErrorKind};
pub use headers::Headers;
pub use method::Method;
pub use request::Request;
pub use response::{IntoResponse, Json, Response};

pub(crate) use body::Content;

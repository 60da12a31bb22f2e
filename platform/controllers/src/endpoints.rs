//! Service and pods → EndpointSlices and Endpoints.
//!
//! ```text
//!   Service (selector, ports) ─┐
//!   pods that match            ├─▶ endpoints by address family and ports ─▶ EndpointSlices of at most 100
//!                              └─▶ one Endpoints object of at most 1,000 addresses (the older form)
//! ```
//!
//! A pod of `runtimeClassName: wasm` is an endpoint like any other. The Endpoints of a Service without a selector are
//! written by a user, and mirrored into EndpointSlices. A Service of type ExternalName has no endpoints. (Behaviour:
//! upstream `pkg/controller/{endpointslice,endpoint,endpointslicemirroring}`.)

mod act;
mod addresses;
mod hints;
mod legacy;
mod slices;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_hints;

pub(crate) use act::EndpointsController;

/// Settings of the endpoints controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Services worked on at the same time.
    pub workers_max: usize,
    /// Endpoints of one EndpointSlice. Upstream's value: a change rewrites the whole slice.
    pub slice_endpoints_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 8, slice_endpoints_max: 100 }
    }
}

//! The request path: routes, admission, traffic, demand.

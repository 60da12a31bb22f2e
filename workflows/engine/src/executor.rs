//! Actions carried out. The machine has decided; here nothing is chosen.
//!
//! [`fair`] says whose effect is next and keeps their number bounded;
//! [`tasks`] calls functions, other workflows, HTTP endpoints and the services that the
//! server adds, [`endpoint`] speaks to AWS's services elsewhere, [`mocked`]
//! asks a script instead; [`files`] reads a Map's items and writes its results.

pub(crate) mod activities;
pub(crate) mod endpoint;
pub(crate) mod fair;
pub(crate) mod files;
pub(crate) mod http;
pub(crate) mod mocked;
pub(crate) mod sdk;
pub(crate) mod tasks;

//! Executes effects. The machine has decided; no decisions are made here.
//!
//! [`fair`] chooses the next effect and bounds their number; [`tasks`] calls functions, other workflows, HTTP
//! endpoints and the services that the server adds, [`endpoint`] calls AWS's services elsewhere, [`mocked`] calls a
//! script instead; [`files`] reads a Map's items and writes its results.

pub(crate) mod activities;
pub(crate) mod endpoint;
pub(crate) mod fair;
pub(crate) mod files;
pub(crate) mod http;
pub(crate) mod mocked;
pub(crate) mod sdk;
pub(crate) mod tasks;

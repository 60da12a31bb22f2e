//! Rules of Services.

use crate::model::{Model, Step, text};

/// No two Services have one cluster IP.
pub(super) fn check(model: &Model, step: &Step, violated: &mut Vec<String>) {
    if step.resource() != "services" {
        return;
    }
    let Some(new) = step.new.as_deref() else { return };
    let address = text(new, "/spec/clusterIP");
    if matches!(address, "" | "None") {
        return;
    }
    let mut others = model.of("services").filter(|(key, _)| **key != step.key);
    if let Some((other, _)) = others.find(|(_, other)| text(other, "/spec/clusterIP") == address) {
        violated.push(format!("the cluster IP {address} is that of {other}"));
    }
}

//! Rules of volumes and claims: a claim is bound to one volume for good, a volume to one claim.

use serde_json::Value;

use super::pods::millis;
use crate::model::{Model, Step, is_terminating, text, uid};

const VOLUME_NAME: &str = "/spec/volumeName";
const CLAIM: &str = "/spec/claimRef/uid";

pub(super) fn check(model: &Model, step: &Step, violated: &mut Vec<String>) {
    match step.resource() {
        "persistentvolumeclaims" => claim(model, step, violated),
        "persistentvolumes" => volume(model, step, violated),
        _ => {}
    }
}

fn claim(model: &Model, step: &Step, violated: &mut Vec<String>) {
    let Some(new) = step.new.as_deref() else { return };
    let before = step.old.as_deref().map_or("", |old| text(old, VOLUME_NAME));
    let name = text(new, VOLUME_NAME);
    if name == before {
        return;
    }
    if !before.is_empty() {
        violated.push(format!("the claim is bound to {before} and now to {name:?}"));
    }
    let mut others = model.of("persistentvolumeclaims").filter(|(key, _)| **key != step.key);
    if let Some((other, _)) = others.find(|(_, other)| text(other, VOLUME_NAME) == name) {
        violated.push(format!("the volume {name} is bound to this claim and to {other}"));
    }
    let reserved = model.named("persistentvolumes", "", name).map_or("", |volume| text(volume, CLAIM));
    if !reserved.is_empty() && reserved != uid(new) {
        violated
            .push(format!("the claim is bound to {name}, which is that of the claim with uid {reserved}"));
    }
}

fn volume(model: &Model, step: &Step, violated: &mut Vec<String>) {
    let Some(old) = step.old.as_deref() else { return };
    let (before, after) = (text(old, CLAIM), step.new.as_deref().map_or("", |new| text(new, CLAIM)));
    if before.is_empty() || before == after {
        return;
    }
    let Some((key, claim)) = model.by_uid(before) else { return };
    if text(claim, VOLUME_NAME) == &*step.key.name {
        violated.push(format!("the volume of {key} is taken from it"));
    }
}

/// What is not as it should be of a claim.
pub(super) fn unconverged_claim(model: &Model, claim: &Value) -> Option<String> {
    let (phase, name) = (text(claim, "/status/phase"), text(claim, VOLUME_NAME));
    if name.is_empty() {
        let mut volumes = model.of("persistentvolumes");
        let fits = volumes.find(|(_, volume)| is_free(volume) && requested(claim) <= capacity(volume));
        return match fits {
            Some((volume, _)) => Some(format!("the claim is not bound and {volume} fits")),
            None => (phase != "Pending").then(|| format!("the claim without a volume is {phase:?}")),
        };
    }
    let volume = model.named("persistentvolumes", "", name);
    let is_bound = volume.is_some_and(|volume| text(volume, CLAIM) == uid(claim));
    let expected = if is_bound { "Bound" } else { "Lost" };
    (phase != expected).then(|| format!("the claim of {name} is {phase:?} and should be {expected}"))
}

/// What is not as it should be of a volume.
pub(super) fn unconverged_volume(model: &Model, name: &str, volume: &Value) -> Option<String> {
    let (phase, claim) = (text(volume, "/status/phase"), text(volume, CLAIM));
    let expected = match model.by_uid(claim) {
        _ if claim.is_empty() => "Available",
        None => "Released",
        Some((_, claim)) if text(claim, VOLUME_NAME) == name => "Bound",
        Some((key, claim)) => {
            return Some(format!(
                "the volume is that of {key}, which is bound to {:?}",
                text(claim, VOLUME_NAME)
            ));
        }
    };
    (phase != expected).then(|| format!("the volume is {phase:?} and should be {expected}"))
}

fn is_free(volume: &Value) -> bool {
    volume["spec"]["claimRef"].is_null() && !is_terminating(volume)
}

fn requested(claim: &Value) -> u64 {
    millis(text(claim, "/spec/resources/requests/storage"))
}

fn capacity(volume: &Value) -> u64 {
    millis(text(volume, "/spec/capacity/storage"))
}

//! When the definitions of objects were changed.

use std::collections::HashMap;

use jiff::Timestamp;
use mayfly_api::{Workflow, workflow::definition};
use parking_lot::Mutex;

use super::definitions::definition_of_object;

/// When the definition of each object was last changed, as the informer saw it: timestamps of objects have whole
/// seconds, too coarse to tell which of two writes was the later one.
#[derive(Default)]
pub(super) struct DefinitionChanges(Mutex<HashMap<String, DefinitionChange>>);

struct DefinitionChange {
    digest: String,
    /// 0 for the definition that was there at the start.
    generation: i64,
    at_ms: i64,
}

impl DefinitionChanges {
    pub(super) fn see(&self, object: &Workflow) {
        let Some(uid) = object.metadata.uid.clone() else { return };
        let mut times = self.0.lock();
        let digest = definition::digest(&definition_of_object(&object.spec)).to_string();
        let at_ms = Timestamp::now().as_millisecond();
        let generation = match times.get(&uid) {
            Some(known) if known.digest == digest => return,
            Some(_) => object.metadata.generation.unwrap_or_default(),
            None => 0,
        };
        times.insert(uid, DefinitionChange { digest, generation, at_ms });
    }

    pub(super) fn forget(&self, object: &Workflow) {
        if let Some(uid) = &object.metadata.uid {
            self.0.lock().remove(uid);
        }
    }

    /// Generation and time of an object's last change.
    pub(super) fn of(&self, object: &Workflow) -> (i64, i64) {
        let times = self.0.lock();
        let known = object.metadata.uid.as_ref().and_then(|uid| times.get(uid));
        known.map_or_else(|| (0, Timestamp::now().as_millisecond()), |known| (known.generation, known.at_ms))
    }
}

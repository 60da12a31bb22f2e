//! Plans the steps that make an object and its state machine equal; pure.

use mayfly_api::workflow::StateMachineType;

/// The state of a state machine's object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectFacts {
    pub(super) leaving: bool,
    pub(super) held: bool,
    pub(super) kind: StateMachineType,
    /// The definition's digest.
    pub(super) digest: String,
    /// The state in which both sides last agreed.
    pub(super) agreed: Option<Agreement>,
    /// The generation that changed the definition last; 0 if it was not changed since the start.
    pub(super) generation: i64,
    /// When the definition was changed last, in milliseconds.
    pub(super) changed_ms: i64,
}

/// A state that both sides had. It is written to the object together with a definition that came from the machine,
/// in one write, so that the reconciler never takes that write for a change by a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreement {
    /// The definition's digest.
    pub(super) digest: String,
    /// The machine's revision.
    pub(super) revision: String,
    /// When the machine was created, in milliseconds: it tells a machine from a later one of the same name. Unknown
    /// where only the status remembers the agreement.
    pub(super) created_ms: Option<i64>,
    /// The object's generation: a definition that was changed to another one and back was still changed.
    pub(super) generation: i64,
}

impl Agreement {
    /// As an annotation's value has it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (digest, revision) = (words.next()?.to_owned(), words.next()?.to_owned());
        let created_ms = Some(words.next()?.parse().ok()?);
        Some(Self { digest, revision, created_ms, generation: words.next()?.parse().ok()? })
    }

    pub(super) fn text(&self) -> String {
        let Self { digest, revision, created_ms, generation } = self;
        format!("{digest} {revision} {} {generation}", created_ms.unwrap_or_default())
    }

    /// Whether the agreement was with this machine, and not with an earlier one of its name.
    fn is_with(&self, machine: &MachineFacts) -> bool {
        self.created_ms.is_none_or(|created_ms| created_ms == machine.created_ms)
    }
}

/// The state of the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MachineFacts {
    /// Deleted, while executions are still running.
    pub(super) leaving: bool,
    pub(super) kind: StateMachineType,
    pub(super) digest: String,
    pub(super) revision: String,
    pub(super) created_ms: i64,
    /// When this revision was made, in milliseconds; for one that the reconciler made from an object, when the
    /// object was changed.
    pub(super) changed_ms: i64,
}

impl MachineFacts {
    /// The agreement of an object that has this machine's definition in this generation.
    pub(super) fn agreement(&self, generation: i64) -> Agreement {
        let (digest, revision) = (self.digest.clone(), self.revision.clone());
        Agreement { digest, revision, created_ms: Some(self.created_ms), generation }
    }
}

/// The state machine in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CatalogMachine<'a> {
    There(&'a MachineFacts),
    /// The object was deleted.
    Deleted,
    /// Nothing is known of it: there never was one, or the catalog was lost.
    Absent,
}

/// The next thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// Put the finalizer on the object, before there is something that it holds.
    Hold,
    CreateMachine,
    UpdateMachine,
    /// Delete the machine, then let the object go.
    DeleteMachine,
    /// Take the finalizer off the object.
    Release,
    CreateObject,
    UpdateObject,
    DeleteObject,
    /// Nothing is left to be done about a machine that was deleted.
    Forget,
    /// Both are alike: say so in the status.
    Agree,
    /// The machine is one that the object cannot be: say so.
    Differ,
    /// The old machine of this name is still on its way out.
    Wait,
}

pub(super) fn plan(object: Option<&ObjectFacts>, machine: CatalogMachine<'_>) -> Step {
    match (object, machine) {
        (None, CatalogMachine::Absent) => Step::Nothing,
        (None, CatalogMachine::Deleted) => Step::Forget,
        (None, CatalogMachine::There(machine)) if machine.leaving => Step::Nothing,
        (None, CatalogMachine::There(_)) => Step::CreateObject,
        (Some(object), machine) if object.leaving => match machine {
            // A machine that was created after the deletion of the object's own stays, and gets an object of its own.
            CatalogMachine::There(machine)
                if !machine.leaving && object.held && is_its_own(object, machine) =>
            {
                Step::DeleteMachine
            }
            _ if object.held => Step::Release,
            _ => Step::Nothing,
        },
        (Some(object), CatalogMachine::Deleted) if object.agreed.is_some() => Step::DeleteObject,
        (Some(object), CatalogMachine::Deleted | CatalogMachine::Absent) => match object.held {
            false => Step::Hold,
            true => Step::CreateMachine,
        },
        (Some(object), CatalogMachine::There(machine)) if machine.leaving => match object.agreed {
            Some(_) => Step::DeleteObject,
            None => Step::Wait,
        },
        (Some(object), CatalogMachine::There(machine)) => alike(object, machine),
    }
}

fn is_its_own(object: &ObjectFacts, machine: &MachineFacts) -> bool {
    object.agreed.as_ref().is_none_or(|agreed| agreed.is_with(machine))
}

fn alike(object: &ObjectFacts, machine: &MachineFacts) -> Step {
    if object.kind != machine.kind {
        // A later machine of another type has nothing of the object; an object of its own is created for it.
        return if is_its_own(object, machine) { Step::Differ } else { Step::DeleteObject };
    }
    if !object.held {
        return Step::Hold;
    }
    if object.digest == machine.digest {
        return Step::Agree;
    }
    let agreed = object.agreed.as_ref();
    let object_changed =
        agreed.is_none_or(|agreed| agreed.digest != object.digest || object.generation > agreed.generation);
    let machine_changed =
        agreed.is_none_or(|agreed| agreed.revision != machine.revision || !agreed.is_with(machine));
    match (object_changed, machine_changed) {
        (true, false) => Step::UpdateMachine,
        (false, _) => Step::UpdateObject,
        // Both left the agreement: the later write stays.
        (true, true) if machine.changed_ms > object.changed_ms => Step::UpdateObject,
        (true, true) => Step::UpdateMachine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(digest: &str, agreed: Option<&str>) -> ObjectFacts {
        let agreed = agreed.map(|digest| machine(digest).agreement(0));
        ObjectFacts {
            generation: 0,
            changed_ms: 0,
            leaving: false,
            held: true,
            kind: StateMachineType::Standard,
            digest: digest.into(),
            agreed,
        }
    }

    fn machine(digest: &str) -> MachineFacts {
        MachineFacts {
            leaving: false,
            kind: StateMachineType::Standard,
            digest: digest.into(),
            // A definition is a revision of its own here.
            revision: digest.into(),
            created_ms: 0,
            changed_ms: 0,
        }
    }

    #[test]
    fn the_side_that_changed_is_followed() {
        let leaving = ObjectFacts { leaving: true, ..object("a", Some("a")) };
        let free = |object: &ObjectFacts| ObjectFacts { held: false, ..object.clone() };
        let going = MachineFacts { leaving: true, ..machine("a") };
        let express = MachineFacts { kind: StateMachineType::Express, ..machine("a") };
        for (object, machine, expected) in [
            (None, None, Step::Nothing),
            (None, Some(machine("a")), Step::CreateObject),
            (None, Some(going.clone()), Step::Nothing),
            (Some(free(&object("a", None))), None, Step::Hold),
            (Some(object("a", None)), None, Step::CreateMachine),
            (Some(object("a", Some("a"))), None, Step::CreateMachine),
            (Some(object("a", None)), Some(machine("a")), Step::Agree),
            (Some(object("b", Some("a"))), Some(machine("a")), Step::UpdateMachine),
            (Some(object("a", Some("a"))), Some(machine("b")), Step::UpdateObject),
            (Some(object("b", Some("a"))), Some(machine("c")), Step::UpdateMachine),
            (Some(object("b", None)), Some(machine("a")), Step::UpdateMachine),
            (Some(object("a", None)), Some(express), Step::Differ),
            (Some(object("a", None)), Some(going.clone()), Step::Wait),
            (Some(object("a", Some("a"))), Some(going.clone()), Step::DeleteObject),
            (Some(leaving.clone()), Some(machine("a")), Step::DeleteMachine),
            (Some(leaving.clone()), Some(going), Step::Release),
            (Some(leaving.clone()), None, Step::Release),
            (Some(free(&leaving)), Some(machine("a")), Step::Nothing),
        ] {
            let machine = machine.as_ref().map_or(CatalogMachine::Absent, CatalogMachine::There);
            assert_eq!(plan(object.as_ref(), machine), expected, "{object:?} {machine:?}");
        }
        for (object, expected) in [
            (None, Step::Forget),
            (Some(object("a", Some("a"))), Step::DeleteObject),
            (Some(leaving), Step::Release),
            // One that came after the deletion.
            (Some(free(&object("a", None))), Step::Hold),
            (Some(object("a", None)), Step::CreateMachine),
        ] {
            assert_eq!(plan(object.as_ref(), CatalogMachine::Deleted), expected, "{object:?}");
        }
    }

    /// A state machine as the catalog has it: there, deleted, or unknown.
    #[derive(Debug)]
    enum Kept {
        There(MachineFacts),
        Deleted,
        Absent,
    }

    impl Kept {
        fn said(&self) -> super::CatalogMachine<'_> {
            match self {
                Self::There(facts) => super::CatalogMachine::There(facts),
                Self::Deleted => super::CatalogMachine::Deleted,
                Self::Absent => super::CatalogMachine::Absent,
            }
        }
    }

    /// Two sides that change in any order, and a reconciler that may stop after any step, end alike.
    #[test]
    fn it_settles() {
        use proptest::prelude::*;
        let change = prop_oneof![
            "[ab]".prop_map(|d| (0, d)),
            "[ab]".prop_map(|d| (1, d)),
            Just((2, String::new())),
            Just((3, String::new())),
            Just((4, String::new())),
        ];
        let settles = |changes: Vec<((i32, String), usize)>| {
            let (mut o, mut m): (Option<ObjectFacts>, Kept) = (None, Kept::Absent);
            for ((what, digest), steps) in changes {
                match what {
                    0 => match &mut o {
                        Some(there) => there.digest = digest,
                        None => o = Some(ObjectFacts { held: false, ..object(&digest, None) }),
                    },
                    1 => m = Kept::There(machine(&digest)),
                    2 => match &mut o {
                        Some(there) if there.held => there.leaving = true,
                        _ => o = None,
                    },
                    3 if matches!(m, Kept::There(_)) => m = Kept::Deleted,
                    3 => {}
                    // The catalog is lost.
                    _ => m = Kept::Absent,
                }
                settle(&mut o, &mut m, steps);
            }
            settle(&mut o, &mut m, 10);
            prop_assert!(matches!(plan(o.as_ref(), m.said()), Step::Nothing | Step::Agree), "{o:?} {m:?}");
            let digest = match &m {
                Kept::There(machine) => Some(machine.digest.clone()),
                Kept::Deleted | Kept::Absent => None,
            };
            prop_assert_eq!(o.as_ref().map(|o| o.digest.clone()), digest);
            Ok(())
        };
        let mut runner = proptest::test_runner::TestRunner::default();
        let changes = proptest::collection::vec((change, 0usize..4), 0..8);
        runner.run(&changes, settles).unwrap();
    }

    fn settle(object: &mut Option<ObjectFacts>, machine: &mut Kept, steps: usize) {
        for _ in 0..steps {
            match (plan(object.as_ref(), machine.said()), &mut *object, &mut *machine) {
                (Step::Hold, Some(object), _) => object.held = true,
                (Step::CreateMachine | Step::UpdateMachine, Some(object), machine) => {
                    *machine = Kept::There(self::machine(&object.digest));
                }
                (Step::DeleteMachine, _, machine) => *machine = Kept::Deleted,
                (Step::Forget, _, machine) => *machine = Kept::Absent,
                (Step::Release, object, _) => *object = None,
                (Step::CreateObject, object, Kept::There(machine)) => {
                    *object = Some(self::object(&machine.digest, Some(&machine.digest)))
                }
                (Step::UpdateObject, Some(object), Kept::There(machine)) => {
                    object.digest.clone_from(&machine.digest);
                    object.agreed = Some(machine.agreement(0));
                }
                (Step::DeleteObject, object, _) => match object {
                    Some(there) if there.held => there.leaving = true,
                    _ => *object = None,
                },
                (Step::Agree, Some(object), Kept::There(machine)) => {
                    object.agreed = Some(machine.agreement(0))
                }
                _ => return,
            }
        }
    }

    #[test]
    fn a_later_machine_inherits_nothing() {
        let later = MachineFacts { created_ms: 9, changed_ms: 9, ..machine("a") };
        let leaving = ObjectFacts { leaving: true, ..object("a", Some("a")) };
        assert_eq!(plan(Some(&leaving), CatalogMachine::There(&later)), Step::Release);
        let express = MachineFacts { kind: StateMachineType::Express, ..later.clone() };
        assert_eq!(plan(Some(&object("a", Some("a"))), CatalogMachine::There(&express)), Step::DeleteObject);
        let other = MachineFacts { digest: "b".into(), ..later };
        assert_eq!(plan(Some(&object("a", Some("a"))), CatalogMachine::There(&other)), Step::UpdateObject);
    }

    #[test]
    fn an_agreement_is_read_as_it_is_written() {
        let agreement = machine("a").agreement(7);
        assert_eq!(Agreement::parse(&agreement.text()), Some(agreement));
        assert_eq!(Agreement::parse("a b"), None);
    }

    /// Both sides, and a reconciler that reads an old copy of the object and acts after others have written.
    struct SynchronisedStores {
        object: Option<ObjectFacts>,
        version: u64,
        cached: (Option<ObjectFacts>, u64),
        machine: Kept,
        now_ms: i64,
    }

    impl SynchronisedStores {
        fn create_machine(&mut self, digest: &str) {
            let (revision, now_ms) = ("INITIAL".to_owned(), self.now_ms);
            let new = MachineFacts { revision, created_ms: now_ms, changed_ms: now_ms, ..machine(digest) };
            self.machine = Kept::There(new);
        }

        fn update_machine(&mut self, digest: &str) {
            let now_ms = self.now_ms;
            if let Kept::There(machine) = &mut self.machine {
                digest.clone_into(&mut machine.digest);
                (machine.revision, machine.changed_ms) = (format!("r{now_ms}"), now_ms);
            }
        }

        fn made_from(&mut self, copy: &ObjectFacts) {
            if let Kept::There(machine) = &mut self.machine {
                machine.changed_ms = copy.changed_ms;
            }
        }

        /// A write of the object is refused where the reconciler's copy is old.
        fn write_object(&mut self, version: u64, write: impl FnOnce(&mut Option<ObjectFacts>)) {
            if version == self.version {
                write(&mut self.object);
                self.version += 1;
            }
        }

        fn act(&mut self, step: Step, copy: (Option<ObjectFacts>, u64), seen: Option<MachineFacts>) {
            let ((copy, version), now_ms) = (copy, self.now_ms);
            let is_seen = matches!((&self.machine, &seen), (Kept::There(now), Some(seen)) if now == seen);
            match (step, copy, seen) {
                (Step::Hold, Some(_), _) => self.write_object(version, |object| {
                    if let Some(object) = object {
                        object.held = true;
                    }
                }),
                (Step::CreateMachine, Some(copy), _) if !matches!(self.machine, Kept::There(_)) => {
                    self.create_machine(&copy.digest);
                    self.made_from(&copy);
                }
                (Step::UpdateMachine, Some(copy), Some(_)) if is_seen => {
                    self.update_machine(&copy.digest);
                    self.made_from(&copy);
                }
                (Step::DeleteMachine, _, Some(_)) if is_seen => self.machine = Kept::Deleted,
                (Step::Forget, ..) if matches!(self.machine, Kept::Deleted) => self.machine = Kept::Absent,
                (Step::Release, ..) => self.write_object(version, |object| *object = None),
                (Step::CreateObject, None, Some(seen)) if self.object.is_none() => {
                    let new = object(&seen.digest, None);
                    let agreed = Some(seen.agreement(1));
                    self.object = Some(ObjectFacts { agreed, generation: 1, changed_ms: now_ms, ..new });
                    self.version += 1;
                }
                (Step::UpdateObject | Step::Agree, Some(_), Some(seen)) => {
                    self.write_object(version, |object| {
                        if let Some(object) = object {
                            object.generation += i64::from(object.digest != seen.digest);
                            object.agreed = Some(seen.agreement(object.generation));
                            object.digest = seen.digest;
                        }
                    })
                }
                (Step::DeleteObject, Some(_), _) => {
                    if let Some(object) = &mut self.object {
                        object.leaving = true;
                        self.version += 1;
                    }
                }
                _ => {}
            }
        }

        /// One run: look, let others write, act.
        fn reconcile(&mut self, meanwhile: &[(u8, u8)], last: &mut Option<String>) {
            let seen = match &self.machine {
                Kept::There(machine) => Some(machine.clone()),
                Kept::Deleted | Kept::Absent => None,
            };
            let copy = self.cached.clone();
            let step = plan(copy.0.as_ref(), self.machine.said());
            meanwhile.iter().for_each(|write| self.write(*write, last));
            self.act(step, copy, seen);
        }

        fn write(&mut self, (kind, digest): (u8, u8), last: &mut Option<String>) {
            self.now_ms += 1;
            let digest = format!("d{digest}");
            match (kind, &mut self.object, &self.machine) {
                (0, _, Kept::There(machine)) if machine.digest != digest => self.update_machine(&digest),
                (0 | 1, _, Kept::Deleted | Kept::Absent) => self.create_machine(&digest),
                (2, Some(object), _) if !object.leaving && object.digest != digest => {
                    (object.digest, object.changed_ms) = (digest.clone(), self.now_ms);
                    object.generation += 1;
                    self.version += 1;
                }
                // A deletion, and a machine of the same name right after it.
                (3, _, Kept::There(_)) => self.create_machine(&digest),
                (4, ..) => {
                    self.cached = (self.object.clone(), self.version);
                    return;
                }
                _ => return,
            }
            *last = Some(digest);
        }
    }

    /// However API writes, object writes and runs of the reconciler meet: the last acknowledged definition is the
    /// final one on both sides.
    #[test]
    fn the_last_acknowledged_write_wins() {
        use proptest::prelude::*;
        let write = (0u8..5, 0u8..4);
        let runs = proptest::collection::vec(proptest::collection::vec(write, 0..4), 1..12);
        let wins = |runs: Vec<Vec<(u8, u8)>>| {
            let (cached, machine) = ((None, 0), Kept::Absent);
            let mut world = SynchronisedStores { object: None, version: 0, cached, machine, now_ms: 0 };
            let mut last = None;
            for meanwhile in &runs {
                world.now_ms += 1;
                world.reconcile(meanwhile, &mut last);
            }
            for _ in 0..20 {
                world.now_ms += 1;
                world.cached = (world.object.clone(), world.version);
                world.reconcile(&[], &mut last);
            }
            let machine = match &world.machine {
                Kept::There(machine) => Some(machine.digest.clone()),
                Kept::Deleted | Kept::Absent => None,
            };
            prop_assert_eq!(&machine, &last);
            prop_assert_eq!(world.object.as_ref().map(|object| object.digest.clone()), last);
            Ok(())
        };
        let config = proptest::test_runner::Config::with_cases(2_000);
        proptest::test_runner::TestRunner::new(config).run(&runs, wins).unwrap();
    }
}

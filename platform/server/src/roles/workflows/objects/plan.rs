//! What has to happen so that an object and its state machine are alike: pure.

use mayfly_api::workflow::WorkflowType;

/// What is known of a state machine's object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectFacts {
    pub(super) leaving: bool,
    pub(super) held: bool,
    pub(super) kind: WorkflowType,
    /// The definition's digest.
    pub(super) digest: String,
    /// On which both sides last agreed.
    pub(super) agreed: Option<String>,
}

/// What is known of the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MachineFacts {
    /// Deleted, while executions are still running.
    pub(super) leaving: bool,
    pub(super) kind: WorkflowType,
    pub(super) digest: String,
}

/// What the catalog says of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Machine<'a> {
    There(&'a MachineFacts),
    /// Somebody deleted it.
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

pub(super) fn plan(object: Option<&ObjectFacts>, machine: Machine<'_>) -> Step {
    match (object, machine) {
        (None, Machine::Absent) => Step::Nothing,
        (None, Machine::Deleted) => Step::Forget,
        (None, Machine::There(machine)) if machine.leaving => Step::Nothing,
        (None, Machine::There(_)) => Step::CreateObject,
        (Some(object), machine) if object.leaving => match machine {
            Machine::There(machine) if !machine.leaving && object.held => Step::DeleteMachine,
            _ if object.held => Step::Release,
            _ => Step::Nothing,
        },
        (Some(object), Machine::Deleted) if object.agreed.is_some() => Step::DeleteObject,
        (Some(object), Machine::Deleted | Machine::Absent) => match object.held {
            false => Step::Hold,
            true => Step::CreateMachine,
        },
        (Some(object), Machine::There(machine)) if machine.leaving => match object.agreed {
            Some(_) => Step::DeleteObject,
            None => Step::Wait,
        },
        (Some(object), Machine::There(machine)) => alike(object, machine),
    }
}

fn alike(object: &ObjectFacts, machine: &MachineFacts) -> Step {
    if object.kind != machine.kind {
        return Step::Differ;
    }
    if !object.held {
        return Step::Hold;
    }
    if object.digest == machine.digest {
        return Step::Agree;
    }
    match object.agreed.as_ref() {
        Some(agreed) if *agreed == object.digest => Step::UpdateObject,
        _ => Step::UpdateMachine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(digest: &str, agreed: Option<&str>) -> ObjectFacts {
        let agreed = agreed.map(str::to_owned);
        ObjectFacts {
            leaving: false,
            held: true,
            kind: WorkflowType::Standard,
            digest: digest.into(),
            agreed,
        }
    }

    fn machine(digest: &str) -> MachineFacts {
        MachineFacts { leaving: false, kind: WorkflowType::Standard, digest: digest.into() }
    }

    #[test]
    fn whoever_left_the_agreement_is_followed() {
        let leaving = ObjectFacts { leaving: true, ..object("a", Some("a")) };
        let free = |object: &ObjectFacts| ObjectFacts { held: false, ..object.clone() };
        let going = MachineFacts { leaving: true, ..machine("a") };
        let express = MachineFacts { kind: WorkflowType::Express, ..machine("a") };
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
            let machine = machine.as_ref().map_or(Machine::Absent, Machine::There);
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
            assert_eq!(plan(object.as_ref(), Machine::Deleted), expected, "{object:?}");
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
        fn said(&self) -> super::Machine<'_> {
            match self {
                Self::There(facts) => super::Machine::There(facts),
                Self::Deleted => super::Machine::Deleted,
                Self::Absent => super::Machine::Absent,
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
                    *object = Some(self::object(&machine.digest, None))
                }
                (Step::UpdateObject, Some(object), Kept::There(machine)) => {
                    object.digest.clone_from(&machine.digest)
                }
                (Step::DeleteObject, object, _) => match object {
                    Some(there) if there.held => there.leaving = true,
                    _ => *object = None,
                },
                (Step::Agree, Some(object), _) => object.agreed = Some(object.digest.clone()),
                _ => return,
            }
        }
    }
}

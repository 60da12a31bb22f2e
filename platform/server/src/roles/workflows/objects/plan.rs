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
    /// Both are alike: say so in the status.
    Agree,
    /// The machine is one that the object cannot be: say so.
    Differ,
    /// The old machine of this name is still on its way out.
    Wait,
}

pub(super) fn plan(object: Option<&ObjectFacts>, machine: Option<&MachineFacts>) -> Step {
    match (object, machine) {
        (None, None) => Step::Nothing,
        (None, Some(machine)) if machine.leaving => Step::Nothing,
        (None, Some(_)) => Step::CreateObject,
        (Some(object), machine) if object.leaving => match machine {
            Some(machine) if !machine.leaving && object.held => Step::DeleteMachine,
            _ if object.held => Step::Release,
            _ => Step::Nothing,
        },
        (Some(object), None) => match (&object.agreed, object.held) {
            (Some(_), _) => Step::DeleteObject,
            (None, false) => Step::Hold,
            (None, true) => Step::CreateMachine,
        },
        (Some(object), Some(machine)) if machine.leaving => match object.agreed {
            Some(_) => Step::DeleteObject,
            None => Step::Wait,
        },
        (Some(object), Some(machine)) => alike(object, machine),
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
            (Some(object("a", Some("a"))), None, Step::DeleteObject),
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
            assert_eq!(plan(object.as_ref(), machine.as_ref()), expected, "{object:?} {machine:?}");
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
        ];
        let settles = |changes: Vec<((i32, String), usize)>| {
            let (mut o, mut m): (Option<ObjectFacts>, Option<MachineFacts>) = (None, None);
            for ((what, digest), steps) in changes {
                match what {
                    0 => match &mut o {
                        Some(there) => there.digest = digest,
                        None => o = Some(ObjectFacts { held: false, ..object(&digest, None) }),
                    },
                    1 => m = Some(machine(&digest)),
                    2 => match &mut o {
                        Some(there) if there.held => there.leaving = true,
                        _ => o = None,
                    },
                    _ => m = None,
                }
                settle(&mut o, &mut m, steps);
            }
            settle(&mut o, &mut m, 10);
            prop_assert!(matches!(plan(o.as_ref(), m.as_ref()), Step::Nothing | Step::Agree), "{o:?} {m:?}");
            prop_assert_eq!(o.as_ref().map(|o| o.digest.clone()), m.as_ref().map(|m| m.digest.clone()));
            Ok(())
        };
        let mut runner = proptest::test_runner::TestRunner::default();
        let changes = proptest::collection::vec((change, 0usize..4), 0..8);
        runner.run(&changes, settles).unwrap();
    }

    fn settle(object: &mut Option<ObjectFacts>, machine: &mut Option<MachineFacts>, steps: usize) {
        for _ in 0..steps {
            match (plan(object.as_ref(), machine.as_ref()), &mut *object, &mut *machine) {
                (Step::Hold, Some(object), _) => object.held = true,
                (Step::CreateMachine | Step::UpdateMachine, Some(object), machine) => {
                    *machine = Some(self::machine(&object.digest));
                }
                (Step::DeleteMachine, _, machine) => *machine = None,
                (Step::Release, object, _) => *object = None,
                (Step::CreateObject, object, Some(machine)) => {
                    *object = Some(self::object(&machine.digest, None))
                }
                (Step::UpdateObject, Some(object), Some(machine)) => {
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

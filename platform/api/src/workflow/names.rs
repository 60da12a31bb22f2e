//! The mapping between the names of state machines and executions and the names of their objects.
//!
//! ```text
//! state machine   order                ⇄ Workflow  default/order
//!                 shop.order           ⇄           shop/order        (if the namespace shop exists)
//!                 Order_2              ⇄           default/order-2-5a3f09c1, spec.stateMachine: Order_2
//! execution       order: 7f3a…         ⇄ Execution order.7f3a…
//!                 order: Run_1         ⇄           order.x---52un-5f1
//! ```
//! A name that is valid for an object is unchanged. Other names of executions are escaped: `x--`, then letters and
//! digits as they are, every other byte as `-` and two hexadecimal digits. A name that becomes too long is `h--` and a
//! digest.

use sha2::{Digest as _, Sha256};

use super::Workflow;
use crate::{
    ObjectKey,
    names::{LABEL_BYTES_MAX, SUBDOMAIN_BYTES_MAX, dns_label, dns_subdomain},
    wellknown::NAMESPACE_DEFAULT,
};

/// The region of this installation: the default of AWS's tools.
pub const REGION: &str = "us-east-1";
/// The account of this installation: the one that the API assigns to keys without an account.
pub const ACCOUNT: &str = "000000000000";
/// The role of state machines without one: it is not used here, but the API requires a value.
pub const ROLE: &str = "arn:aws:iam::000000000000:role/mayfly";
/// The prefix of the ARNs of state machines that are created from objects.
pub const STATE_MACHINE_PREFIX: &str = "arn:aws:states:us-east-1:000000000000:stateMachine:";
/// The prefix of execution ARNs, independent of the region and account of their state machine.
pub const EXECUTION_PREFIX: &str = "arn:aws:states:us-east-1:000000000000:execution:";
/// Longest name of a state machine (API reference, CreateStateMachine).
pub const STATE_MACHINE_CHARACTERS_MAX: usize = 80;
/// The prefix of an escaped name.
const ESCAPED: &str = "x--";
/// The prefix of a digest that replaces a name.
const DIGESTED: &str = "h--";

/// The ARN of a workflow's state machine.
pub fn state_machine_arn(workflow: &Workflow) -> String {
    match workflow.spec.state_machine.as_deref() {
        Some(arn) if arn.starts_with("arn:") => arn.to_owned(),
        Some(name) => format!("{STATE_MACHINE_PREFIX}{name}"),
        None => format!("{STATE_MACHINE_PREFIX}{}", state_machine_name(&ObjectKey::of(workflow))),
    }
}

/// The name of a state machine that its object does not name: `name`, or `namespace.name` outside default.
pub fn state_machine_name(workflow: &ObjectKey) -> String {
    match workflow.namespace.as_str() {
        "" | NAMESPACE_DEFAULT => workflow.name.clone(),
        namespace => format!("{namespace}.{}", workflow.name),
    }
}

/// The object of a state machine that has none yet; and its `spec.stateMachine`, where the name alone does not
/// say it.
pub fn workflow_of(arn: &str, is_namespace: impl Fn(&str) -> bool) -> (ObjectKey, Option<String>) {
    if let Some(name) = arn.strip_prefix(STATE_MACHINE_PREFIX) {
        if dns_label(name).is_ok() {
            return (ObjectKey::new(NAMESPACE_DEFAULT, name), None);
        }
        if let Some((namespace, rest)) = name.split_once('.')
            && namespace != NAMESPACE_DEFAULT
            && dns_label(rest).is_ok()
            && is_namespace(namespace)
        {
            return (ObjectKey::new(namespace, rest), None);
        }
    }
    workflow_of_digest(arn)
}

/// The object of a state machine whose name cannot be an object's, or is taken.
pub fn workflow_of_digest(arn: &str) -> (ObjectKey, Option<String>) {
    let name = arn.rsplit(':').next().unwrap_or(arn);
    let asked = arn.strip_prefix(STATE_MACHINE_PREFIX).unwrap_or(arn);
    (ObjectKey::new(NAMESPACE_DEFAULT, slug(name, asked)), Some(asked.to_owned()))
}

/// A label that starts with `name` and ends with a digest of `whole`.
fn slug(name: &str, whole: &str) -> String {
    const DIGEST_BYTES: usize = 4;
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let text: String = name.chars().map(plain).take(LABEL_BYTES_MAX - 2 * DIGEST_BYTES - 1).collect();
    let digest = hex::encode(&Sha256::digest(whole)[..DIGEST_BYTES]);
    match text.trim_matches('-') {
        "" => format!("w-{digest}"),
        text => format!("{text}-{digest}"),
    }
}

/// The object name of an execution.
pub fn execution(workflow: &str, name: &str) -> String {
    let plain = dns_subdomain(name).is_ok() && !name.starts_with(ESCAPED) && !name.starts_with(DIGESTED);
    let text = match plain {
        true => format!("{workflow}.{name}"),
        false => format!("{workflow}.{ESCAPED}{}", escape(name)),
    };
    if text.len() <= SUBDOMAIN_BYTES_MAX {
        return text;
    }
    format!("{workflow}.{DIGESTED}{}", hex::encode(&Sha256::digest(name)[..16]))
}

/// The workflow, and the execution's own name, in the object name of an execution. `None` for the own name if a
/// digest replaces it.
pub fn parse_execution(object: &str) -> Option<(&str, Option<String>)> {
    let (workflow, rest) = object.split_once('.')?;
    if let Some(escaped) = rest.strip_prefix(ESCAPED) {
        return Some((workflow, Some(unescape(escaped)?)));
    }
    let is_digest = rest.starts_with(DIGESTED);
    Some((workflow, (!is_digest).then(|| rest.to_owned())))
}

fn escape(name: &str) -> String {
    let mut out = String::with_capacity(name.len() * 2);
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' => out.push(char::from(byte)),
            other => out.push_str(&format!("-{other:02x}")),
        }
    }
    out
}

fn unescape(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        rest = match first {
            b'-' => {
                let digits = std::str::from_utf8(after.get(..2)?).ok()?;
                bytes.push(u8::from_str_radix(digits, 16).ok()?);
                &after[2..]
            }
            plain => {
                bytes.push(*plain);
                after
            }
        };
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arns_are_of_one_region_and_account() {
        assert_eq!(STATE_MACHINE_PREFIX, format!("arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:"));
        assert_eq!(EXECUTION_PREFIX, format!("arn:aws:states:{REGION}:{ACCOUNT}:execution:"));
        assert_eq!(ROLE, format!("arn:aws:iam::{ACCOUNT}:role/mayfly"));
    }

    #[test]
    fn state_machines_have_objects_and_the_other_way_round() {
        let of = |name: &str| workflow_of(&format!("{STATE_MACHINE_PREFIX}{name}"), |ns| ns == "shop");
        assert_eq!(of("order"), (ObjectKey::new("default", "order"), None));
        assert_eq!(of("shop.order"), (ObjectKey::new("shop", "order"), None));
        for name in
            ["Order_2", "nowhere.order", "shop.Order", "default.order", "a.b.c", "___", &"x".repeat(80)]
        {
            let (key, asked) = of(name);
            assert_eq!((key.namespace.as_str(), asked.as_deref()), ("default", Some(name)));
            assert_eq!(dns_label(&key.name), Ok(()), "{name}");
        }
        assert_ne!(of("Order_2").0, of("Order.2").0);
        let elsewhere = "arn:aws:states:eu-west-1:000000000000:stateMachine:order";
        let (key, asked) = workflow_of(elsewhere, |_| true);
        assert_eq!(asked.as_deref(), Some(elsewhere));
        let mut workflow = Workflow::new(&key.name, super::super::WorkflowSpec::default());
        workflow.metadata.namespace = Some(key.namespace);
        workflow.spec.state_machine = asked;
        assert_eq!(state_machine_arn(&workflow), elsewhere);
        assert_eq!(state_machine_name(&ObjectKey::new("shop", "order")), "shop.order");
        assert_eq!(state_machine_name(&ObjectKey::new("default", "order")), "order");
    }

    #[test]
    fn executions_are_found_again_by_their_object_name() {
        for name in ["7f3a-1", "a.b", "Run_1", "x--a", "h--a", "é!", "-a", "A", &"Z".repeat(50)] {
            let object = execution("order", name);
            assert_eq!(dns_subdomain(&object), Ok(()), "{name}: {object}");
            assert_eq!(parse_execution(&object), Some(("order", Some(name.to_owned()))), "{object}");
        }
        assert_eq!(execution("order", "Run_1"), "order.x---52un-5f1");
        let long = execution("order", &"Ä".repeat(80));
        assert_eq!(dns_subdomain(&long), Ok(()));
        assert_eq!(parse_execution(&long), Some(("order", None)));
        for wrong in ["order", "order.x---5", "order.x---zz"] {
            assert_eq!(parse_execution(wrong).and_then(|(_, name)| name), None, "{wrong}");
        }
    }
}

//! The text of a decoding error as Go's `encoding/json` writes it for upstream's types: clients and people search for
//! it.

use super::wire::{GoStruct, Multiplicity, Scalar, WireField, message, message_of};
use crate::registry::Kind;

/// Fields of type int64; upstream's other numbers are int32.
const INT64: [&str; 16] = [
    "activeDeadlineSeconds",
    "currentRevision",
    "deletionGracePeriodSeconds",
    "expirationSeconds",
    "fsGroup",
    "generation",
    "observedGeneration",
    "remainingItemCount",
    "revision",
    "runAsGroup",
    "runAsUser",
    "seconds",
    "stabilizationWindowSeconds",
    "supplementalGroups",
    "terminationGracePeriodSeconds",
    "tolerationSeconds",
];

/// One step from an object to a value in it.
#[derive(Clone, Copy, Debug)]
pub(super) enum GoStep<'a> {
    /// A field of a struct or a key of a map.
    Name(&'a str),
    Item,
}

/// `Go struct field PodSpec.spec.containers of type []v1.Container`; `None` if upstream has no such field.
pub(super) fn field_and_type<'a>(kind: &Kind, path: impl Iterator<Item = GoStep<'a>>) -> Option<String> {
    if kind.custom {
        return None;
    }
    let mut at =
        At { fields: Some(message_of(kind.group, kind.version, kind.kind)?), owner: kind.kind, value: None };
    let mut shown: Vec<&str> = Vec::new();
    for step in path {
        match (at.value, step) {
            // An item of a list or a value of a map belongs to the same field.
            (Some((field, true)), _) => at = at.inside(field),
            (_, GoStep::Name(name)) => {
                let field = find(at.fields?, name)?;
                shown.push(name);
                if let Some((Scalar::Struct(of), false)) = at.value.map(|(field, many)| (field.scalar, many))
                {
                    at.owner = short(of);
                }
                at.value = Some((field, field.multiplicity != Multiplicity::One));
                if field.multiplicity == Multiplicity::One {
                    at = at.inside(field);
                }
            }
            (_, GoStep::Item) => return None,
        }
    }
    let (field, many) = at.value?;
    let item = scalar(field);
    let of_type = match (field.multiplicity, many) {
        (Multiplicity::List, true) => format!("[]{item}"),
        (Multiplicity::Map, true) => format!("map[string]{item}"),
        _ => item,
    };
    Some(format!("Go struct field {}.{} of type {of_type}", at.owner, shown.join(".")))
}

/// A place in an object.
#[derive(Clone, Copy)]
struct At {
    /// The fields of the value, if it is a struct.
    fields: Option<&'static GoStruct>,
    /// The Go name of the struct that has the field.
    owner: &'static str,
    /// The field, and whether the place is the whole list or map in it.
    value: Option<(&'static WireField, bool)>,
}

impl At {
    /// The value of a field, or an item of it.
    fn inside(self, field: &'static WireField) -> Self {
        let fields = match field.scalar {
            Scalar::Struct(name) => message(name),
            _ => None,
        };
        Self { fields, value: Some((field, false)), ..self }
    }
}

fn find(fields: &'static GoStruct, name: &str) -> Option<&'static WireField> {
    fields.fields.iter().find_map(|field| match (field.name, field.scalar) {
        (found, _) if found == name => Some(field),
        ("", Scalar::Struct(embedded)) => find(message(embedded)?, name),
        _ => None,
    })
}

/// `core.v1.PodSpec` is `PodSpec`.
fn short(name: &'static str) -> &'static str {
    name.rsplit('.').next().unwrap_or(name)
}

fn scalar(field: &WireField) -> String {
    match field.scalar {
        Scalar::Text => "string".into(),
        Scalar::Integer if INT64.contains(&field.name) => "int64".into(),
        Scalar::Integer => "int32".into(),
        Scalar::Boolean => "bool".into(),
        Scalar::Double => "float64".into(),
        Scalar::Bytes => "[]uint8".into(),
        Scalar::Time => "v1.Time".into(),
        Scalar::MicroTime => "v1.MicroTime".into(),
        Scalar::Quantity => "resource.Quantity".into(),
        Scalar::IntOrString => "intstr.IntOrString".into(),
        Scalar::Raw => "runtime.RawExtension".into(),
        Scalar::FieldsV1 => "v1.FieldsV1".into(),
        Scalar::Duration => "v1.Duration".into(),
        Scalar::Struct(name) => {
            let mut parts = name.rsplit('.');
            let (name, version) = (parts.next().unwrap_or(name), parts.next().unwrap_or("v1"));
            format!("{version}.{name}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(group: &str, plural: &str, path: &[GoStep<'_>]) -> String {
        let kind = crate::registry::registry().find(group, "v1", plural).unwrap();
        field_and_type(kind, path.iter().copied()).unwrap_or_default()
    }

    /// The texts are recorded from kube-apiserver 1.28.
    #[test]
    fn fields_and_types_are_those_of_upstreams_go_types() {
        use GoStep::{Item, Name};
        let cases: &[(&str, &str, &[GoStep<'_>], &str)] = &[
            ("", "configmaps", &[Name("metadata")], "ConfigMap.metadata of type v1.ObjectMeta"),
            ("", "configmaps", &[Name("data"), Name("key")], "ConfigMap.data of type string"),
            (
                "networking.k8s.io",
                "networkpolicies",
                &[Name("metadata"), Name("labels")],
                "ObjectMeta.metadata.labels of type map[string]string",
            ),
            (
                "",
                "pods",
                &[Name("spec"), Name("containers")],
                "PodSpec.spec.containers of type []v1.Container",
            ),
            (
                "",
                "pods",
                &[Name("spec"), Name("nodeSelector"), Name("a")],
                "PodSpec.spec.nodeSelector of type string",
            ),
            (
                "rbac.authorization.k8s.io",
                "roles",
                &[Name("rules"), Item, Name("apiGroups")],
                "PolicyRule.rules.apiGroups of type []string",
            ),
            (
                "",
                "serviceaccounts",
                &[Name("imagePullSecrets"), Item],
                "ServiceAccount.imagePullSecrets of type v1.LocalObjectReference",
            ),
            ("apps", "controllerrevisions", &[Name("revision")], "ControllerRevision.revision of type int64"),
            ("", "events", &[Name("count")], "Event.count of type int32"),
            ("networking.k8s.io", "ingresses", &[Name("status")], "Ingress.status of type v1.IngressStatus"),
        ];
        for (group, plural, path, expected) in cases {
            assert_eq!(told(group, plural, path), format!("Go struct field {expected}"));
        }
        assert_eq!(told("", "configmaps", &[Name("absent")]), "");
    }
}

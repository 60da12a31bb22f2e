//! Values as XML, and XML as values, by their shapes.

use std::sync::Arc;

use mayfly_workflows_language::value::{Map, Value};
use roxmltree::Node;

use super::model::{MemberLocation, MemberShape, Members, ShapeType, argument, sdk_spelling};

/// The values of elements among a parent's children, by their names.
pub(super) fn members(parent: Node<'_, '_>, shapes: &Members) -> Vec<(Arc<str>, Value)> {
    let in_body = |shape: &MemberShape| matches!(shape.place, None | Some(MemberLocation::Attribute));
    let found = shapes.iter().filter(|(_, shape)| in_body(shape)).filter_map(|(name, shape)| {
        let value = member(parent, shape.wire_name(name), shape)?;
        Some((sdk_spelling(name).into(), value))
    });
    found.collect()
}

fn member(parent: Node<'_, '_>, name: &str, shape: &MemberShape) -> Option<Value> {
    let of_name = |node: &Node<'_, '_>, name: &str| node.is_element() && node.tag_name().name() == name;
    match (shape.kind, &shape.item) {
        _ if shape.place == Some(MemberLocation::Attribute) => {
            let local = name.rsplit(':').next().unwrap_or(name);
            parent.attributes().find(|attribute| attribute.name() == local).map(|it| Value::from(it.value()))
        }
        (ShapeType::List, Some(item)) if shape.flattened => {
            let items: Vec<_> = parent.children().filter(|node| of_name(node, name)).collect();
            (!items.is_empty()).then(|| items.into_iter().map(|node| value(node, item)).collect())
        }
        _ => parent.children().find(|node| of_name(node, name)).map(|node| value(node, shape)),
    }
}

/// The value of an element.
pub(super) fn value(node: Node<'_, '_>, shape: &MemberShape) -> Value {
    let elements = || node.children().filter(Node::is_element);
    match (shape.kind, &shape.item, &shape.key, &shape.value) {
        (ShapeType::Structure, ..) => {
            let mut found = members(node, &shape.members);
            found.sort_by(|(a, _), (b, _)| a.cmp(b));
            Value::object(found)
        }
        (ShapeType::List, Some(item), ..) => elements().map(|node| value(node, item)).collect(),
        (ShapeType::Map, _, Some(key), Some(of)) => {
            let entry = |entry: Node<'_, '_>| {
                let name = member(entry, key.wire_name("key"), key)?;
                Some((name.as_str()?.into(), member(entry, of.wire_name("value"), of)?))
            };
            Value::from(elements().filter_map(entry).collect::<Map>())
        }
        (kind, ..) => scalar(&text(node), kind),
    }
}

fn text(node: Node<'_, '_>) -> String {
    node.children().filter_map(|child| child.text()).collect()
}

/// A plain value from its text; times are ISO 8601 without idle digits, as the SDK for Java prints them.
pub(super) fn scalar(text: &str, kind: ShapeType) -> Value {
    let told = match kind {
        ShapeType::Integer => text.trim().parse::<i64>().ok().map(Value::from),
        ShapeType::Boolean => text.trim().parse::<bool>().ok().map(Value::from),
        ShapeType::Timestamp => {
            text.trim().parse::<jiff::Timestamp>().ok().map(|at| Value::from(at.to_string()))
        }
        _ => None,
    };
    told.unwrap_or_else(|| Value::from(text))
}

/// Writes a value as an element.
pub(super) fn write(out: &mut String, name: &str, given: &Value, shape: &MemberShape) {
    out.push_str(&format!("<{name}{}>", attributes(given, shape)));
    write_inside(out, given, shape);
    out.push_str(&format!("</{name}>"));
}

/// Writes the content between an element's tags.
pub(super) fn write_inside(out: &mut String, given: &Value, shape: &MemberShape) {
    match (given, shape.kind, &shape.item) {
        (Value::Object(given), ShapeType::Structure, _) => {
            for (name, shape) in shape.members.iter().filter(|(_, shape)| shape.place.is_none()) {
                let Some(value) = argument(given, name) else { continue };
                match (value, &shape.item) {
                    (Value::Array(items), Some(item)) if shape.flattened => {
                        items.iter().for_each(|value| write(out, shape.wire_name(name), value, item));
                    }
                    _ => write(out, shape.wire_name(name), value, shape),
                }
            }
        }
        (Value::Array(items), ShapeType::List, Some(item)) => {
            items.iter().for_each(|value| write(out, item.wire_name("member"), value, item));
        }
        (given, ..) => out.push_str(&escaped(&plain(given))),
    }
}

/// Attributes have names with the prefix of a namespace that is declared beside them.
fn attributes(given: &Value, shape: &MemberShape) -> String {
    let Some(given) = given.as_object() else { return String::new() };
    let there = shape.members.iter().filter(|(_, shape)| shape.place == Some(MemberLocation::Attribute));
    let told = there.filter_map(|(name, shape)| {
        let value = escaped(&plain(argument(given, name)?));
        let name = shape.wire_name(name);
        Some(format!(" xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\" {name}=\"{value}\""))
    });
    told.collect()
}

/// A text as it is, anything else as JSON.
pub(super) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_text(), str::to_owned)
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\r' => out.push_str("&#13;"),
            '\n' => out.push_str("&#10;"),
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::model::S3;
    use super::*;

    fn written(operation: &str, member: &str, given: &str) -> String {
        let mut out = String::new();
        write(&mut out, member, &Value::parse(given).expect("JSON"), &S3[operation].input[member]);
        out
    }

    #[test]
    fn values_are_written_by_their_shapes() {
        assert_eq!(
            written(
                "DeleteObjects",
                "Delete",
                r#"{"Objects":[{"Key":"a<&b"},{"Key":"c","VersionId":"v"}],"Quiet":true}"#
            ),
            "<Delete><Object><Key>a&lt;&amp;b</Key></Object><Object><Key>c</Key><VersionId>v</VersionId></Object>\
             <Quiet>true</Quiet></Delete>"
        );
        assert_eq!(
            written("PutObjectTagging", "Tagging", r#"{"TagSet":[{"Key":"k","Value":"v"}]}"#),
            "<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>"
        );
    }

    #[test]
    fn elements_are_read_by_their_shapes() {
        let text = "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name><Prefix/>\
                    <IsTruncated>false</IsTruncated><Contents><Key>a&amp;b</Key><Size>3</Size><ETag>&quot;x&quot;</ETag>\
                    <LastModified>2024-02-01T10:00:00.000Z</LastModified><Unknown>1</Unknown></Contents></ListBucketResult>";
        let document = roxmltree::Document::parse(text).expect("XML");
        let found = Value::object(members(document.root_element(), &S3["ListObjectsV2"].output));
        assert_eq!(
            found.to_text(),
            r#"{"IsTruncated":false,"Contents":[{"ETag":"\"x\"","Key":"a&b","LastModified":"2024-02-01T10:00:00Z","Size":3}],"Name":"b","Prefix":""}"#
        );
        let text = "<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>";
        let document = roxmltree::Document::parse(text).expect("XML");
        let found = Value::object(members(document.root_element(), &S3["GetObjectTagging"].output));
        assert_eq!(found.to_text(), r#"{"TagSet":[{"Key":"k","Value":"v"}]}"#);
    }
}

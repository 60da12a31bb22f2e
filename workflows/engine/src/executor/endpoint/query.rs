//! The query protocol: an operation is a form, its answer XML.

use bytes::Bytes;
use http::{Method, Request, Uri, header};
use mayfly_workflows_language::value::{Map, Value};

use super::escaped;
use super::model::{MemberShape, Members, Operation, ShapeType, argument};
use super::xml::{self, plain};

/// The request of one operation.
pub(super) fn request(
    url: &Uri,
    name: &str,
    version: &str,
    operation: &Operation,
    arguments: &Map,
) -> Result<Request<Bytes>, String> {
    let mut pairs = vec![format!("Action={name}"), format!("Version={version}")];
    members(&mut pairs, "", &operation.input, arguments);
    let uri = format!("{}/", url.to_string().trim_end_matches('/'));
    Request::builder()
        .method(Method::POST)
        .uri(uri)
        .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded; charset=utf-8")
        .body(pairs.join("&").into())
        .map_err(|error| error.to_string())
}

fn members(pairs: &mut Vec<String>, prefix: &str, shapes: &Members, given: &Map) {
    for (name, shape) in shapes {
        if let Some(value) = argument(given, name) {
            add(pairs, format!("{prefix}{}", shape.wire_name(name)), value, shape);
        }
    }
}

fn add(pairs: &mut Vec<String>, name: String, given: &Value, shape: &MemberShape) {
    match (given, shape.kind, &shape.item, &shape.key, &shape.value) {
        (Value::Object(given), ShapeType::Structure, ..) => {
            members(pairs, &format!("{name}."), &shape.members, given);
        }
        (Value::Array(items), ShapeType::List, Some(item), ..) => {
            for (at, value) in (1..).zip(items.iter()) {
                add(pairs, format!("{name}.{}.{at}", item.wire_name("member")), value, item);
            }
        }
        (Value::Object(given), ShapeType::Map, _, Some(key), Some(of)) => {
            for (at, (key_given, value)) in (1..).zip(given.iter()) {
                let entry = format!("{name}.entry.{at}");
                pairs.push(format!("{entry}.{}={}", key.wire_name("key"), escaped(key_given)));
                add(pairs, format!("{entry}.{}", of.wire_name("value")), value, of);
            }
        }
        (given, ..) => pairs.push(format!("{name}={}", escaped(&plain(given)))),
    }
}

/// An answer as a task's result, and the request's number.
pub(super) fn answer(operation: &Operation, body: &Bytes) -> Result<(Value, String), String> {
    let text = std::str::from_utf8(body).map_err(|_| "the answer is not UTF-8 text".to_owned())?;
    let document =
        roxmltree::Document::parse(text).map_err(|error| format!("the answer is no XML: {error}"))?;
    let root = document.root_element();
    let wrapper = operation.wrapper.as_deref();
    let result = root.children().find(|node| Some(node.tag_name().name()) == wrapper).unwrap_or(root);
    let mut members = xml::members(result, &operation.output);
    members.sort_by(|(a, _), (b, _)| a.cmp(b));
    let request_id = root.descendants().find(|node| node.tag_name().name() == "RequestId");
    let request_id = request_id.and_then(|node| node.text()).unwrap_or_default().to_owned();
    Ok((Value::object(members), request_id))
}

#[cfg(test)]
mod tests {
    use super::super::model::SNS;
    use super::*;

    #[test]
    fn arguments_become_a_form() {
        let arguments = Value::parse(
            r#"{"TopicArn":"arn:t","Message":{"a":1},"MessageAttributes":{"k":{"DataType":"String","StringValue":"v w"}}}"#,
        );
        let arguments = arguments.expect("JSON");
        let url = "http://h:1".parse().expect("a URL");
        let arguments = arguments.as_object().expect("an object");
        let request = request(&url, "Publish", "2010-03-31", &SNS["Publish"], arguments).expect("a request");
        assert_eq!(
            request.body(),
            "Action=Publish&Version=2010-03-31&TopicArn=arn%3At&Message=%7B%22a%22%3A1%7D\
             &MessageAttributes.entry.1.Name=k&MessageAttributes.entry.1.Value.DataType=String\
             &MessageAttributes.entry.1.Value.StringValue=v%20w"
        );
    }

    #[test]
    fn an_answer_is_read_from_its_wrapper() {
        let body = "<PublishResponse xmlns=\"http://sns.amazonaws.com/doc/2010-03-31/\"><PublishResult><MessageId>m\
                    </MessageId></PublishResult><ResponseMetadata><RequestId>r</RequestId></ResponseMetadata>\
                    </PublishResponse>";
        let (told, request_id) = answer(&SNS["Publish"], &Bytes::from(body)).expect("an answer");
        assert_eq!((told.to_text().as_str(), request_id.as_str()), (r#"{"MessageId":"m"}"#, "r"));
        assert!(answer(&SNS["Publish"], &Bytes::from("<html>")).is_err());
    }
}

//! `patch`: the four kinds of patches, each applied in the compare-and-swap loop of an update.

use std::io;

use json_patch::PatchOperation;
use serde_json::Value;

use super::{Part, WriteOutcome, WriteRequest, set_type, update::ObjectUpdate, validate_schema};
use crate::{
    decode::{
        Decoded,
        numbers::{self, NumberText},
    },
    meta,
    object::Object,
    registry::Kind,
    server::ServerState,
    status::ApiError,
};

/// The maximum number of operations in one JSON patch (upstream's limit).
const JSON_PATCH_OPERATIONS_MAX: usize = 10_000;
/// The maximum number of bytes that the copies of one JSON patch may add (upstream's limit): copying a list into
/// itself doubles it each time.
const JSON_PATCH_COPIED_BYTES_MAX: usize = 3 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchForm {
    Json,
    Merge,
    Strategic,
}

impl PatchForm {
    pub(crate) fn from_content_type(text: &str) -> Option<Self> {
        match text {
            "application/json-patch+json" => Some(Self::Json),
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            _ => None,
        }
    }
}

/// A decoded patch.
#[derive(Clone, Debug)]
pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    pub(crate) fn parse(form: PatchForm, kind: &Kind, body: &Value) -> Result<Self, ApiError> {
        match form {
            PatchForm::Json => Ok(Self::Json(parse_json(body)?)),
            _ if !body.is_object() => {
                Err(ApiError::bad_request("error decoding patch: it is not a JSON object"))
            }
            PatchForm::Merge => Ok(Self::Merge(body.clone())),
            PatchForm::Strategic if kind.custom => Err(ApiError::unsupported_media_type(&[
                "application/json-patch+json",
                "application/merge-patch+json",
                "application/apply-patch+yaml",
            ])),
            PatchForm::Strategic => Ok(Self::Strategic(body.clone())),
        }
    }

    /// The numbers of the patch whose texts are kept, by their paths in the patched object. As upstream, a strategic
    /// patch keeps none.
    fn numbers_in_object(&self, numbers: &[NumberText]) -> Vec<NumberText> {
        match self {
            Self::Merge(_) => numbers.to_vec(),
            Self::Json(patch) => {
                let moved = |number: &NumberText| Some(number.at(path_in_object(&patch.0, number.path())?));
                numbers.iter().filter_map(moved).collect()
            }
            Self::Strategic(_) => Vec::new(),
        }
    }

    /// The patched object, before it is normalised to its kind.
    fn apply(&self, kind: &Kind, current: &Object) -> Result<Object, ApiError> {
        let mut value = Value::Object(current.0.clone());
        match self {
            Self::Json(patch) => apply_json(&mut value, patch)?,
            Self::Merge(patch) => json_patch::merge(&mut value, patch),
            Self::Strategic(patch) => {
                crate::patch::strategic(kind, &mut value, patch).map_err(ApiError::bad_request)?
            }
        }
        match value {
            Value::Object(map) => Ok(Object(map)),
            _ => Err(ApiError::unprocessable("the patched value is not a JSON object")),
        }
    }
}

/// The path of a number in the value of an operation of a JSON patch, in the patched object: `0/value/memory` of an
/// operation at `/spec/limits` is `spec/limits/memory`.
fn path_in_object(operations: &[PatchOperation], path: &[String]) -> Option<Vec<String>> {
    let [at, member, rest @ ..] = path else { return None };
    let operation = operations.get(at.parse::<usize>().ok()?).filter(|_| member == "value")?;
    let target = match operation {
        PatchOperation::Add(operation) => &operation.path,
        PatchOperation::Replace(operation) => &operation.path,
        _ => return None,
    };
    let target = target.tokens().map(|token| token.decoded().into_owned());
    Some(target.chain(rest.iter().cloned()).collect())
}

/// Parses a JSON patch and checks the number of its operations.
pub(crate) fn parse_json(body: &Value) -> Result<json_patch::Patch, ApiError> {
    let patch: json_patch::Patch = serde_json::from_value(body.clone())
        .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
    if patch.0.len() > JSON_PATCH_OPERATIONS_MAX {
        let message = format!(
            "The allowed maximum operations in a JSON patch is {JSON_PATCH_OPERATIONS_MAX}, got {}",
            patch.0.len()
        );
        return Err(ApiError::too_large_patch(message));
    }
    Ok(patch)
}

/// Applies a JSON patch. After an error the value is partially patched.
pub(crate) fn apply_json(value: &mut Value, patch: &json_patch::Patch) -> Result<(), ApiError> {
    let mut copied_bytes = 0;
    for (at, operation) in patch.0.iter().enumerate() {
        if let PatchOperation::Copy(copy) = operation
            && let Some(from) = value.pointer(copy.from.as_str())
        {
            copied_bytes += encoded_bytes(from)?;
            if copied_bytes > JSON_PATCH_COPIED_BYTES_MAX {
                return Err(ApiError::too_large_patch(format!(
                    "Unable to complete the copy, the accumulated size increase of copy is {copied_bytes}, exceeding \
                     the limit {JSON_PATCH_COPIED_BYTES_MAX}"
                )));
            }
        }
        json_patch::patch(value, std::slice::from_ref(operation)).map_err(|mut error| {
            error.operation = at;
            tracing::debug!(%error, "a JSON patch does not apply");
            ApiError::patch_refused()
        })?;
    }
    Ok(())
}

/// The length of a value as JSON.
fn encoded_bytes(value: &Value) -> Result<usize, ApiError> {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).map_err(ApiError::internal)?;
    Ok(count.0)
}

impl ServerState {
    pub(crate) async fn patch(
        &self,
        request: &WriteRequest,
        name: &str,
        part: Part,
        patch: Patch,
        body: &Decoded,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        self.change(request, name, part, |current| {
            let mut object = patch.apply(kind, current)?;
            numbers::restore(kind, &mut object.0, &patch.numbers_in_object(&body.numbers));
            set_type(kind, &mut object)?;
            meta::set_name_and_namespace(&mut object, kind, &request.namespace, Some(name))?;
            let duplicates = body.duplicates.clone();
            let strict = |why: String| ApiError::invalid_patch(&body.value.to_string(), &why);
            let warnings = validate_schema(kind, &mut object, duplicates, request.validation, strict)?;
            Ok(ObjectUpdate { object, warnings, applied: false })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn copies_are_bounded() {
        let mut operations = vec![json!({"op": "add", "path": "/x", "value": [0]})];
        operations.resize(41, json!({"op": "copy", "from": "/x", "path": "/x/-"}));
        let patch = parse_json(&Value::Array(operations)).unwrap();
        let error = apply_json(&mut json!({}), &patch).unwrap_err();
        assert_eq!(error.code, 413);
        assert!(error.message.contains("exceeding the limit 3145728"), "{}", error.message);
    }

    #[test]
    fn an_operation_that_fails_is_told_by_its_number() {
        let patch = json!([{"op": "add", "path": "/a", "value": 1}, {"op": "copy", "from": "/a", "path": "/b"},
                           {"op": "test", "path": "/b", "value": 2}]);
        let error = apply_json(&mut json!({}), &parse_json(&patch).unwrap()).unwrap_err();
        assert_eq!(
            (error.code, error.message.as_str()),
            (422, "the server rejected our request due to an error in our request")
        );
    }
}

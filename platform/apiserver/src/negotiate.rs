//! Content negotiation: the representation of the response, and the encoding of the body.

use http::{HeaderMap, HeaderValue, header};

use crate::status::ApiError;

/// The representation of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Representation {
    Object,
    Table,
    /// `PartialObjectMetadata`, and its list.
    Metadata,
}

/// The form of a body, by its content type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyForm {
    Json,
    Yaml,
    /// For some kinds only: see [`crate::protobuf`].
    Protobuf,
}

/// The encoding of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Json,
    /// JSON with a field a line.
    IndentedJson,
    Yaml,
    /// For kinds that have it: see [`crate::protobuf`].
    Protobuf,
}

/// One media range of an `Accept` header.
struct Range<'a> {
    media: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
}

/// The ranges by descending quality, then in their order. Ranges of quality 0 are left out.
fn ranges(accept: &str) -> impl Iterator<Item = Range<'_>> {
    let parts = accept.split(',').filter(|part| !part.trim().is_empty());
    let mut ranges: Vec<Range<'_>> = parts
        .map(|part| {
            let mut pieces = part.split(';').map(str::trim);
            let media = pieces.next().unwrap_or("");
            Range { media, parameters: pieces.filter_map(|piece| piece.split_once('=')).collect() }
        })
        .filter(|range| range.quality() > 0.0)
        .collect();
    ranges.sort_by(|one, other| other.quality().total_cmp(&one.quality()));
    ranges.into_iter()
}

impl Range<'_> {
    fn get(&self, name: &str) -> &str {
        self.parameters.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value)
    }

    /// The quality of the range; 1 if it is absent or invalid.
    fn quality(&self) -> f32 {
        self.get("q").parse().unwrap_or(1.0)
    }

    /// The encoding that the range asks for; JSON for a wildcard.
    fn encoding(&self) -> Option<Encoding> {
        match self.media {
            "application/json" | "application/*" | "*/*" => Some(Encoding::Json),
            "application/yaml" => Some(Encoding::Yaml),
            "application/vnd.kubernetes.protobuf" => Some(Encoding::Protobuf),
            _ => None,
        }
    }

    fn representation(&self) -> Option<Representation> {
        self.encoding()?;
        match (self.get("as"), self.get("v")) {
            ("", _) => Some(Representation::Object),
            ("Table", "v1" | "v1beta1") => Some(Representation::Table),
            ("PartialObjectMetadata" | "PartialObjectMetadataList", "v1" | "v1beta1") => {
                Some(Representation::Metadata)
            }
            _ => None,
        }
    }
}

fn accept(headers: &HeaderMap) -> String {
    let all = headers.get_all(header::ACCEPT);
    all.iter().filter_map(|value| value.to_str().ok()).collect::<Vec<_>>().join(",")
}

/// The first acceptable range decides, as upstream's clients expect.
pub(crate) fn representation(headers: &HeaderMap) -> Result<Representation, ApiError> {
    let accept = accept(headers);
    if accept.trim().is_empty() {
        return Ok(Representation::Object);
    }
    ranges(&accept).find_map(|range| range.representation()).ok_or_else(ApiError::not_acceptable)
}

/// The representation of a stream of events, which is never YAML.
pub(crate) fn stream_representation(headers: &HeaderMap) -> Result<Representation, ApiError> {
    let accept = accept(headers);
    if accept.trim().is_empty() {
        return Ok(Representation::Object);
    }
    let mut json = ranges(&accept).filter(|range| range.encoding() == Some(Encoding::Json));
    json.find_map(|range| range.representation()).ok_or_else(ApiError::not_acceptable_stream)
}

/// The encoding of a response to a request with these headers and this query.
pub(crate) fn encoding(headers: &HeaderMap, query: &str) -> Encoding {
    let json = if is_for_reading(headers, query) { Encoding::IndentedJson } else { Encoding::Json };
    // The fast path of nearly every request, without parsing the ranges.
    let is_other = |value: &HeaderValue| {
        let mut windows = value.as_bytes().windows(4);
        windows.any(|part| part == b"yaml" || part == b"prot")
    };
    if !headers.get_all(header::ACCEPT).iter().any(is_other) {
        return json;
    }
    let accept = accept(headers);
    // A range whose form is not served does not decide the encoding of the next one.
    let served = |range: Range<'_>| range.representation().and(range.encoding());
    match ranges(&accept).find_map(served) {
        Some(other @ (Encoding::Yaml | Encoding::Protobuf)) => other,
        _ => json,
    }
}

/// Whether JSON is indented: on request, and for programs that show it to people (upstream's `isPrettyPrint`).
fn is_for_reading(headers: &HeaderMap, query: &str) -> bool {
    if query.contains("pretty=")
        && let Some((_, value)) = url::form_urlencoded::parse(query.as_bytes())
            .find(|(key, value)| key == "pretty" && !value.is_empty())
    {
        return matches!(&*value, "1" | "t" | "T" | "true" | "True" | "TRUE");
    }
    let agent = headers.get(header::USER_AGENT).map_or(&[][..], HeaderValue::as_bytes);
    [&b"curl"[..], b"Wget", b"Mozilla/5.0"].iter().any(|program| agent.starts_with(program))
}

/// The requested form of discovery: `Some(version)` for the aggregated one.
pub(crate) fn aggregated_discovery(headers: &HeaderMap) -> Option<&'static str> {
    let accept = accept(headers);
    for range in ranges(&accept).filter(|range| range.encoding().is_some()) {
        match (range.get("as"), range.get("g"), range.get("v")) {
            ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2") => return Some("v2"),
            ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2beta1") => return Some("v2beta1"),
            ("", ..) => return None,
            _ => {}
        }
    }
    None
}

/// A body's media type without parameters; `application/json` when there is none.
pub(crate) fn content_type(headers: &HeaderMap) -> String {
    let text = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    match text.split(';').next().map(str::trim) {
        None | Some("" | "*/*") => "application/json".into(),
        Some(media) => media.to_ascii_lowercase(),
    }
}

/// The form of an object's body.
pub(crate) fn body_form(headers: &HeaderMap) -> Result<BodyForm, ApiError> {
    match content_type(headers).as_str() {
        "application/json" => Ok(BodyForm::Json),
        "application/vnd.kubernetes.protobuf" => Ok(BodyForm::Protobuf),
        "application/yaml" | "application/x-yaml" | "text/yaml" => Ok(BodyForm::Yaml),
        _ => Err(unsupported_body()),
    }
}

/// The error for a body of an unknown type.
pub(crate) fn unsupported_body() -> ApiError {
    ApiError::unsupported_media_type(&["application/json", "application/yaml"])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(accept: &'static str) -> HeaderMap {
        [(header::ACCEPT, HeaderValue::from_static(accept))].into_iter().collect()
    }

    #[test]
    fn representations() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        for (accept, expected) in [
            ("", Some(Representation::Object)),
            ("*/*", Some(Representation::Object)),
            ("application/json, */*", Some(Representation::Object)),
            (table, Some(Representation::Table)),
            (
                "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
                Some(Representation::Metadata),
            ),
            ("application/vnd.kubernetes.protobuf,application/json", Some(Representation::Object)),
            ("application/vnd.kubernetes.protobuf", Some(Representation::Object)),
            ("application/cbor", None),
            ("application/json;as=Chart;v=v1", None),
            ("application/json;as=Chart;v=v1,application/json", Some(Representation::Object)),
            ("application/yaml", Some(Representation::Object)),
            ("application/yaml;as=Table;v=v1;g=meta.k8s.io", Some(Representation::Table)),
            ("application/json;q=0", None),
        ] {
            assert_eq!(representation(&with(accept)).ok(), expected, "{accept}");
        }
    }

    #[test]
    fn encodings() {
        for (accept, expected, of_a_stream) in [
            ("", Encoding::Json, true),
            ("*/*", Encoding::Json, true),
            ("application/yaml", Encoding::Yaml, false),
            ("application/yaml;q=0.9, text/html", Encoding::Yaml, false),
            ("text/html, application/yaml, application/json", Encoding::Yaml, true),
            ("application/json, application/yaml", Encoding::Json, true),
            ("application/json;q=0.5, application/yaml;q=0.8", Encoding::Yaml, true),
            ("*/*;q=0.1,application/yaml", Encoding::Yaml, true),
            ("application/yaml;as=Chart;v=v1, application/json", Encoding::Json, true),
            ("application/yaml;q=0, application/json;q=0.1", Encoding::Json, true),
            ("application/vnd.kubernetes.protobuf,application/json", Encoding::Protobuf, true),
            ("application/vnd.kubernetes.protobuf", Encoding::Protobuf, false),
            ("application/json,application/vnd.kubernetes.protobuf", Encoding::Json, true),
        ] {
            assert_eq!(encoding(&with(accept), ""), expected, "{accept}");
            assert_eq!(stream_representation(&with(accept)).is_ok(), of_a_stream, "{accept}");
        }
    }

    #[test]
    fn json_for_people_is_indented() {
        for (agent, query, expected) in [
            ("kubectl/v1", "", Encoding::Json),
            ("kubectl/v1", "limit=1&pretty=true", Encoding::IndentedJson),
            ("kubectl/v1", "pretty=", Encoding::Json),
            ("curl/8.0", "", Encoding::IndentedJson),
            ("curl/8.0", "pretty=false", Encoding::Json),
            ("Mozilla/5.0 (X11)", "pretty=", Encoding::IndentedJson),
        ] {
            let headers = [(header::USER_AGENT, HeaderValue::from_static(agent))].into_iter().collect();
            assert_eq!(encoding(&headers, query), expected, "{agent} {query}");
        }
    }

    #[test]
    fn discovery_forms() {
        let kubectl = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
        assert_eq!(aggregated_discovery(&with(kubectl)), Some("v2"));
        assert_eq!(aggregated_discovery(&with("application/json")), None);
        assert_eq!(
            aggregated_discovery(&with(
                "application/json;as=APIGroupDiscoveryList;v=v9;g=apidiscovery.k8s.io"
            )),
            None
        );
    }
}

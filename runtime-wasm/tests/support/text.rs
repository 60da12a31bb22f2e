// Components written as text, for tests that do not need the examples' toolchain.

/// A component of `wasi:http/incoming-handler@0.2` around a core module's `handle`, which gets the handles of the
/// request and of the response-outparam. It may call `$answer` with the latter: status 200 without a body. `$fields`
/// creates headers, and `$append` adds to them: there are letters for names and values at [`TEXT_AT`].
pub(crate) fn handler(module: &str) -> Vec<u8> {
    let text = HANDLER.replace("MODULE", module).replace("TEXT", &"a".repeat(TEXT_AT));
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// The address of the text of [`handler`], and its length in bytes.
pub(crate) const TEXT_AT: usize = 4096;

const HANDLER: &str = r#"
(component
  (type $types (instance
    (type $dns (record (field "rcode" (option string)) (field "info-code" (option u16))))
    (export "DNS-error-payload" (type $DNS (eq $dns)))
    (type $tls (record (field "alert-id" (option u8)) (field "alert-message" (option string))))
    (export "TLS-alert-received-payload" (type $TLS (eq $tls)))
    (type $size (record (field "field-name" (option string)) (field "field-size" (option u32))))
    (export "field-size-payload" (type $SIZE (eq $size)))
    (type $code (variant
      (case "DNS-timeout") (case "DNS-error" $DNS) (case "destination-not-found")
      (case "destination-unavailable") (case "destination-IP-prohibited")
      (case "destination-IP-unroutable") (case "connection-refused") (case "connection-terminated")
      (case "connection-timeout") (case "connection-read-timeout") (case "connection-write-timeout")
      (case "connection-limit-reached") (case "TLS-protocol-error") (case "TLS-certificate-error")
      (case "TLS-alert-received" $TLS) (case "HTTP-request-denied") (case "HTTP-request-length-required")
      (case "HTTP-request-body-size" (option u64)) (case "HTTP-request-method-invalid")
      (case "HTTP-request-URI-invalid") (case "HTTP-request-URI-too-long")
      (case "HTTP-request-header-section-size" (option u32))
      (case "HTTP-request-header-size" (option $SIZE))
      (case "HTTP-request-trailer-section-size" (option u32)) (case "HTTP-request-trailer-size" $SIZE)
      (case "HTTP-response-incomplete") (case "HTTP-response-header-section-size" (option u32))
      (case "HTTP-response-header-size" $SIZE) (case "HTTP-response-body-size" (option u64))
      (case "HTTP-response-trailer-section-size" (option u32)) (case "HTTP-response-trailer-size" $SIZE)
      (case "HTTP-response-transfer-coding" (option string))
      (case "HTTP-response-content-coding" (option string)) (case "HTTP-response-timeout")
      (case "HTTP-upgrade-failed") (case "HTTP-protocol-error") (case "loop-detected")
      (case "configuration-error") (case "internal-error" (option string))))
    (export "error-code" (type $error-code (eq $code)))
    (export "fields" (type $fields (sub resource)))
    (export "incoming-request" (type $incoming-request (sub resource)))
    (export "response-outparam" (type $response-outparam (sub resource)))
    (export "outgoing-response" (type $outgoing-response (sub resource)))
    (export "[constructor]fields" (func (result (own $fields))))
    (type $wrong-header (variant (case "invalid-syntax") (case "forbidden") (case "immutable")))
    (export "header-error" (type $header-error (eq $wrong-header)))
    (export "[method]fields.append"
      (func (param "self" (borrow $fields)) (param "name" string) (param "value" (list u8))
        (result (result (error $header-error)))))
    (export "[constructor]outgoing-response"
      (func (param "headers" (own $fields)) (result (own $outgoing-response))))
    (export "[static]response-outparam.set"
      (func (param "param" (own $response-outparam))
        (param "response" (result (own $outgoing-response) (error $error-code)))))))
  (import "wasi:http/types@0.2.0" (instance $http (type $types)))
  (alias export $http "incoming-request" (type $incoming-request))
  (alias export $http "response-outparam" (type $response-outparam))
  (core module $memory (memory (export "memory") 1) (data (i32.const 4096) "TEXT"))
  (core instance $memory (instantiate $memory))
  (core func $fields (canon lower (func $http "[constructor]fields")))
  (core func $append (canon lower (func $http "[method]fields.append")
    (memory (core memory $memory "memory")) string-encoding=utf8))
  (core func $response (canon lower (func $http "[constructor]outgoing-response")))
  (core func $set (canon lower (func $http "[static]response-outparam.set")
    (memory (core memory $memory "memory")) string-encoding=utf8))
  (core module $guest
    (import "host" "fields" (func $fields (result i32)))
    (import "host" "append" (func $append (param i32 i32 i32 i32 i32 i32)))
    (import "host" "response" (func $response (param i32) (result i32)))
    (import "host" "set" (func $set (param i32 i32 i32 i32 i64 i32 i32 i32 i32)))
    (func $answer (param $out i32)
      (call $set (local.get $out) (i32.const 0) (call $response (call $fields))
        (i32.const 0) (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)))
    MODULE)
  (core instance $host (export "fields" (func $fields)) (export "response" (func $response))
    (export "append" (func $append))
    (export "set" (func $set)))
  (core instance $guest (instantiate $guest (with "host" (instance $host))))
  (func $handle (param "request" (own $incoming-request)) (param "response-out" (own $response-outparam))
    (canon lift (core func $guest "handle")))
  (component $exported
    (import "incoming-request" (type $incoming-request (sub resource)))
    (import "response-outparam" (type $response-outparam (sub resource)))
    (import "handle" (func $handle
      (param "request" (own $incoming-request)) (param "response-out" (own $response-outparam))))
    (export "handle" (func $handle)))
  (instance $exported (instantiate $exported
    (with "incoming-request" (type $incoming-request))
    (with "response-outparam" (type $response-outparam))
    (with "handle" (func $handle))))
  (export "wasi:http/incoming-handler@0.2.0" (instance $exported)))
"#;

/// A component of `wasi:cli/run@0.2` around a core module's `run`: 0 is success, 1 is failure.
pub(crate) fn command(module: &str) -> Vec<u8> {
    let text = format!(
        r#"(component
            (core module $guest {module})
            (core instance $guest (instantiate $guest))
            (func $run (result (result)) (canon lift (core func $guest "run")))
            (instance $exported (export "run" (func $run)))
            (export "wasi:cli/run@0.2.0" (instance $exported)))"#
    );
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}"))
}

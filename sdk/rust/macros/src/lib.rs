//! The attributes of `mayfly-sdk`.
//!
//! They do not change the function, and add the component's export next to it. Written with `proc_macro` only, so that
//! a function's first build does not compile a Rust parser.

use proc_macro::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};

/// Makes an `async fn(Request) -> impl IntoResponse` the component's handler.
///
/// The function may also take nothing, and may return `Result<R, E>` where `E`
/// converts into `mayfly::Error`.
#[proc_macro_attribute]
pub fn http(options: TokenStream, item: TokenStream) -> TokenStream {
    expand("http", "serve", options, item)
}

/// Makes an `async fn(In) -> Result<Out, E>` the component's handler for events: the event is JSON in a POST request,
/// the result is returned as JSON.
#[proc_macro_attribute]
pub fn event(options: TokenStream, item: TokenStream) -> TokenStream {
    expand("event", "serve_event", options, item)
}

fn expand(attribute: &str, serve: &str, options: TokenStream, item: TokenStream) -> TokenStream {
    if let Some(token) = options.into_iter().next() {
        return refuse(token.span(), &format!("#[mayfly::{attribute}] takes no options"));
    }
    let handler = match Handler::parse(attribute, item.clone()) {
        Ok(handler) => handler,
        Err((span, message)) => return refuse(span, &message),
    };
    // A handler without parameters ignores its argument.
    let call = if handler.has_parameter { "__handler" } else { "|_| __handler()" };
    let glue: TokenStream = format!(
        r#"
        #[cfg(target_arch = "wasm32")]
        const _: () = {{
            struct Export;
            impl ::mayfly::__rt::Guest for Export {{
                fn handle(
                    request: ::mayfly::__rt::IncomingRequest,
                    out: ::mayfly::__rt::ResponseOutparam,
                ) {{
                    ::mayfly::__rt::{serve}(request, out, {call})
                }}
            }}
            ::mayfly::__rt::export!(Export with_types_in ::mayfly::__rt::wasip2);
        }};
        // On other targets (unit tests on the host) the function is only a function.
        #[cfg(not(target_arch = "wasm32"))]
        const _: () = {{ let _ = __handler; }};
        "#
    )
    .parse()
    .expect("the glue is valid Rust");
    let mut output = item;
    output.extend(rename(glue, &handler.name));
    output
}

/// The properties of the annotated function that the generated code needs.
struct Handler {
    name: Ident,
    has_parameter: bool,
}

impl Handler {
    fn parse(attribute: &str, item: TokenStream) -> Result<Handler, (Span, String)> {
        let mut is_async = false;
        let mut tokens = item.into_iter();
        while let Some(token) = tokens.next() {
            let TokenTree::Ident(word) = &token else { continue };
            match word.to_string().as_str() {
                "async" => is_async = true,
                "fn" if !is_async => {
                    return Err((word.span(), format!("#[mayfly::{attribute}] needs an `async fn`")));
                }
                "fn" => {
                    let Some(TokenTree::Ident(name)) = tokens.next() else { break };
                    return match tokens.next() {
                        Some(TokenTree::Group(list)) if list.delimiter() == Delimiter::Parenthesis => {
                            Self::with_parameters(attribute, name, &list)
                        }
                        _ => Err((name.span(), "a handler cannot be generic".to_owned())),
                    };
                }
                _ => {}
            }
        }
        Err((Span::call_site(), format!("#[mayfly::{attribute}] belongs on an `async fn`")))
    }

    fn with_parameters(attribute: &str, name: Ident, list: &Group) -> Result<Handler, (Span, String)> {
        // Commas inside `(…)` and `[…]` are in separate groups; those inside `<…>` are not, so the depth is counted.
        let (mut depth, mut parameters, mut open) = (0i32, 0, false);
        for token in list.stream() {
            if let TokenTree::Punct(mark) = &token {
                match mark.as_char() {
                    '<' => depth += 1,
                    '>' => depth -= 1,
                    ',' if depth == 0 => {
                        open = false;
                        continue;
                    }
                    _ => {}
                }
            }
            if !open {
                parameters += 1;
                open = true;
            }
        }
        if parameters > 1 {
            let wanted = if attribute == "http" { "the request" } else { "the event" };
            return Err((
                list.span(),
                format!("a #[mayfly::{attribute}] handler takes one parameter, {wanted}"),
            ));
        }
        Ok(Handler { name, has_parameter: parameters == 1 })
    }
}

/// Replaces `__handler` in the generated code by the function's own name with its span, so that a wrong signature is
/// reported at the function.
fn rename(glue: TokenStream, name: &Ident) -> TokenStream {
    glue.into_iter()
        .map(|token| match token {
            TokenTree::Ident(word) if word.to_string() == "__handler" => TokenTree::Ident(name.clone()),
            TokenTree::Group(group) => {
                let mut renamed = Group::new(group.delimiter(), rename(group.stream(), name));
                renamed.set_span(group.span());
                TokenTree::Group(renamed)
            }
            other => other,
        })
        .collect()
}

fn refuse(span: Span, message: &str) -> TokenStream {
    let error: TokenStream = format!("::core::compile_error!({message:?});").parse().expect("valid Rust");
    error
        .into_iter()
        .map(|mut token| {
            token.set_span(span);
            token
        })
        .collect()
}

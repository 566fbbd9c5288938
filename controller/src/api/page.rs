//! The page: static files in the binary, nothing from elsewhere.

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

type File = ([(axum::http::HeaderName, &'static str); 1], &'static str);

const fn file(kind: &'static str, text: &'static str) -> File {
    ([(CONTENT_TYPE, kind)], text)
}

pub(super) async fn html() -> impl IntoResponse {
    file("text/html; charset=utf-8", include_str!("../page/index.html"))
}

pub(super) async fn css() -> impl IntoResponse {
    file("text/css; charset=utf-8", include_str!("../page/page.css"))
}

pub(super) async fn script() -> impl IntoResponse {
    file("text/javascript; charset=utf-8", include_str!("../page/page.js"))
}

pub(super) async fn charts() -> impl IntoResponse {
    file("text/javascript; charset=utf-8", include_str!("../page/charts.js"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// What the language and browsers bring; and what stands in texts and styles.
    const KNOWN: &[&str] = &[
        "Date",
        "Error",
        "Map",
        "Number",
        "Set",
        "String",
        "addEventListener",
        "async",
        "catch",
        "decodeURIComponent",
        "encodeURIComponent",
        "fetch",
        "for",
        "if",
        "return",
        "setInterval",
        "setTimeout",
        "switch",
        "while",
        "ef",
        "hsl",
        "mix",
        "var",
    ];

    fn is_name(c: char) -> bool {
        c.is_alphanumeric() || c == '_' || c == '$'
    }

    /// Names that are called, and names that stand anywhere else: as a constant, a function, a parameter or a reference.
    fn names(script: &str) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let (mut called, mut others) = (BTreeSet::new(), BTreeSet::new());
        let (mut before, mut begun) = ("", None);
        for (at, c) in script.char_indices().chain([(script.len(), ' ')]) {
            if is_name(c) {
                begun.get_or_insert(at);
                continue;
            }
            let Some(start) = begun.take() else { continue };
            let name = &script[start..at];
            let of_object = script[..start].ends_with('.') && !script[..start].ends_with("...");
            match c == '(' && before != "function" {
                _ if of_object || name.starts_with(|c: char| c.is_ascii_digit()) => false,
                true => called.insert(name),
                false => others.insert(name),
            };
            before = name;
        }
        (called, others)
    }

    /// No engine runs the scripts in a test: a function that is called and nowhere defined would end every look at a job.
    #[test]
    fn every_function_that_the_page_calls_is_there() {
        let both = concat!(include_str!("../page/page.js"), include_str!("../page/charts.js"));
        let (called, others) = names(both);
        let missing: Vec<_> = called.iter().filter(|name| !others.contains(*name) && !KNOWN.contains(name)).collect();
        assert!(missing.is_empty(), "called, and defined nowhere: {missing:?}");
        let (called, others) = names("const a = (b) => b(1) + c(2) + d.e(3); function f() {} f();");
        assert!(called.contains("c") && !others.contains("c"));
        assert!(["a", "b", "f"].iter().all(|name| others.contains(name)) && !called.contains("e"));
    }
}

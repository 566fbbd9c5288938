//! Lists on the command line.

/// Texts of compressors, separated by commas that stand outside parentheses.
pub fn compressor_texts(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0i32;
    let outside = move |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth <= 0
    };
    list.split(outside).map(str::trim)
}

//! Rows as text.

use super::measure::Row;
use std::fmt::Write;

/// A table, one line per row.
pub fn text(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.method.len()).chain([6]).max().unwrap_or(6);
    let mut out = format!(
        "{:width$} {:>10} {:5} {:>9} {:>8} {:>11} {:>7} {:>8} {:>10} {:>8}\n",
        "method", "n", "dtype", "values", "GB/s in", "bytes out", "gain", "to copy", "decompress", "to torch"
    );
    for row in rows {
        let torch = row.ratio_to_torch.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{:width$} {:>10} {:5} {:>9} {:>8.2} {:>11} {:>7.4} {:>8.2} {:>10.2} {torch:>8}",
            row.method,
            row.n,
            row.dtype,
            row.distribution,
            row.gb_per_s,
            row.bytes_out,
            row.gain,
            row.ratio_to_copy,
            row.decompress_ratio_to_copy
        );
    }
    out
}

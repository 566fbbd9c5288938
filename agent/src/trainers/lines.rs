//! Lines of bounded length off a stream.

use flexcomm_wire::MAX_LINE;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};

/// Why there is no line.
#[derive(Debug)]
pub(crate) enum LineError {
    /// Longer than [`MAX_LINE`].
    TooLong,
    /// The connection.
    Io(std::io::Error),
}

/// Reads up to the next newline into `line`, which begins empty unless an earlier call was dropped in the middle.
/// False at the end of the stream, where half a line counts for nothing.
pub(crate) async fn read_line(stream: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> Result<bool, LineError> {
    loop {
        let found = stream.fill_buf().await.map_err(LineError::Io)?;
        if found.is_empty() {
            return Ok(false);
        }
        let newline = found.iter().position(|byte| *byte == b'\n');
        let taken = newline.unwrap_or(found.len());
        if line.len() + taken > MAX_LINE {
            return Err(LineError::TooLong);
        }
        line.extend_from_slice(&found[..taken]);
        stream.consume(taken + usize::from(newline.is_some()));
        if newline.is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    async fn all(bytes: &[u8], buffer: usize) -> (Vec<Vec<u8>>, bool) {
        let mut stream = tokio::io::BufReader::with_capacity(buffer, bytes);
        let mut lines = Vec::new();
        loop {
            let mut line = Vec::new();
            match read_line(&mut stream, &mut line).await {
                Ok(true) => lines.push(line),
                Ok(false) => return (lines, true),
                Err(_) => return (lines, false),
            }
        }
    }

    #[tokio::test]
    async fn long_lines_are_refused() {
        let mut bytes = b"short\n".to_vec();
        bytes.extend(vec![b'x'; MAX_LINE]);
        bytes.extend(b"\n");
        assert!(all(&bytes, 1000).await.1);
        bytes.insert(10, b'x');
        let (lines, whole) = all(&bytes, 1000).await;
        assert_eq!((lines.len(), whole), (1, false));
    }

    proptest! {
        #[test]
        fn lines_are_what_stands_between_newlines(bytes in prop::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..300), buffer in 1usize..50) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (lines, whole) = runtime.block_on(all(&bytes, buffer));
            let mut expected: Vec<&[u8]> = bytes.split(|b| *b == b'\n').collect();
            expected.pop();
            prop_assert!(whole);
            prop_assert_eq!(lines, expected);
        }
    }
}

"""Writes the Parquet files of the reader tests with pyarrow, as Hugging Face `datasets` stores chat data."""

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {
        "id": 1,
        "messages": [
            {"role": "user", "content": "Turn slowly by 30."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "turn", "arguments": {"angle": 30, "speed": 1}}}],
            },
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": "Turned.", "loss": 0.5},
        ],
    },
    {
        "id": 2,
        "messages": [
            {"role": "user", "content": "Say hi."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "say", "arguments": {"text": "hi"}}}],
            },
            {"role": "assistant", "content": "说了。"},
        ],
    },
    {"id": 3, "messages": [{"role": "user", "content": "No answer."}]},
    {"id": 4, "messages": []},
    {"id": 5, "messages": None},
]
TEXT_ARGUMENTS = [
    {
        "messages": [
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "turn", "arguments": '{"angle": null,  "speed":8}'}}],
            },
        ],
        "tools": '[{"type": "function", "function": {"name": "turn", "parameters": {"b": null, "a": 1}}}]',
    }
]
PARTS = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Add: "}, {"type": "text", "text": "3+4"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "7"}]},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "cat.png"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ]
    },
]
ALPACA = [{"instruction": f"Question {i}", "input": "" if i % 2 else None, "output": f"Answer {i}"} for i in range(1, 1001)]

pq.write_table(pa.Table.from_pylist(ROWS), "tools.parquet", compression="snappy")
pq.write_table(pa.Table.from_pylist(TEXT_ARGUMENTS), "text-arguments.parquet", compression="gzip")
pq.write_table(pa.Table.from_pylist(PARTS), "parts.parquet", compression="brotli")
pq.write_table(pa.Table.from_pylist(ALPACA), "alpaca.parquet", compression="zstd", row_group_size=300)
pq.write_table(
    pa.Table.from_pylist([{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "when": None}]).set_column(
        1, "when", pa.array([0], pa.timestamp("us"))
    ),
    "sharegpt.parquet",
    compression="lz4",
    data_page_version="2.0",
    use_dictionary=False,
    column_encoding={"conversations.list.element.value": "DELTA_LENGTH_BYTE_ARRAY"},
)
pq.write_table(pa.Table.from_pylist([{"text": "plain", "label": 1}]), "unknown.parquet")

// Answers with tool calls, reasoning and schemas through the helpers of the official JavaScript client. Run by tests/api/test_parsed_answers.py.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const Add = z.object({ a: z.number().int(), b: z.number().int() });
const Sum = z.object({ value: z.number().int(), kind: z.enum(["even", "odd"]) });
const tools = [zodFunction({ name: "Add", parameters: Add })];
const chat = { model: "scripted", messages: [{ role: "user", content: "What is 2 + 3?" }] };

function check(choice) {
  assert.deepEqual([choice.finish_reason, choice.message.content], ["tool_calls", "Let me compute."]);
  assert.deepEqual(choice.message.tool_calls.map((call) => [call.id, call.type, call.function.parsed_arguments]), [
    ["call_1", "function", { a: 2, b: 3 }],
    ["call_2", "function", { a: 4, b: 5 }],
  ]);
}

test("an answer calls tools", async () => {
  const { choices: [choice] } = await client.chat.completions.parse({ ...chat, tools });
  check(choice);
  assert.equal(choice.message.reasoning, "I add them.");
});

test("the stream helper puts the same answer together", async () => {
  const stream = client.chat.completions.stream({ ...chat, tools });
  const done = [];
  let reasoning = "";
  stream.on("tool_calls.function.arguments.done", (event) => done.push([event.index, event.name, event.parsed_arguments]));
  stream.on("chunk", (chunk) => { reasoning += chunk.choices[0]?.delta.reasoning ?? ""; });
  check((await stream.finalChatCompletion()).choices[0]);
  assert.deepEqual(done, [[0, "Add", { a: 2, b: 3 }], [1, "Add", { a: 4, b: 5 }]]);
  assert.equal(reasoning, "I add them.");
});

test("tools are run until there is an answer", async () => {
  const add = zodFunction({ name: "Add", parameters: Add, function: ({ a, b }) => String(a + b) });
  const runner = client.chat.completions.runTools({ ...chat, tools: [add] });
  assert.equal(await runner.finalContent(), "5 and 9");
});

test("a schema of zod is read", async () => {
  const format = { ...chat, response_format: zodResponseFormat(Sum, "sum") };
  const { choices: [choice] } = await client.chat.completions.parse(format);
  assert.deepEqual(choice.message.parsed, { value: 5, kind: "odd" });
  const streamed = await client.chat.completions.stream(format).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, { value: 5, kind: "odd" });
});

// What the JDK's own HttpClient and WebSocket do with the server, as they come: no version is set, so that each new
// connection offers HTTP/2. Run as `java Client.java URL VERB JSON`; prints what the server said.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.net.http.WebSocket;
import java.io.ByteArrayInputStream;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.stream.Stream;

public class Client {
    static final HttpClient CLIENT = HttpClient.newHttpClient();

    public static void main(String[] args) throws Exception {
        String url = args[0], json = args[2];
        switch (args[1]) {
            case "whole" -> whole(url, json);
            case "stream" -> stream(url, json);
            case "websocket" -> websocket(url, json);
            default -> throw new IllegalArgumentException(args[1]);
        }
    }

    static HttpRequest.Builder post(String url, HttpRequest.BodyPublisher body) {
        return HttpRequest.newBuilder(URI.create(url)).header("Content-Type", "application/json").POST(body);
    }

    /** An answer in one piece, to a body of known length and to one in chunks; the second uses the connection again. */
    static void whole(String url, String json) throws Exception {
        byte[] body = json.getBytes(StandardCharsets.UTF_8);
        HttpRequest[] requests = {
            post(url + "/v1/completions", BodyPublishers.ofByteArray(body)).build(),
            post(url + "/v1/completions", BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body))).build(),
        };
        for (HttpRequest request : requests) {
            HttpResponse<String> answer = CLIENT.send(request, BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version());
            System.out.println(answer.body());
        }
    }

    /** Server-sent events line by line: three of them, then the connection is given up and the rest is asked for. */
    static void stream(String url, String json) throws Exception {
        HttpRequest begin = post(url + "/v1/streams", BodyPublishers.ofString(json))
            .header("Accept", "text/event-stream").build();
        HttpResponse<Stream<String>> first = CLIENT.send(begin, BodyHandlers.ofLines());
        String lastId = "";
        try (Stream<String> lines = first.body()) {
            Iterator<String> line = lines.iterator();
            for (int events = 0; events < 3; ) {
                String text = line.next();
                System.out.println(text);
                if (text.startsWith("id: ")) lastId = text.substring(4);
                if (text.isEmpty()) events++;
            }
        }
        String id = first.headers().firstValue("x-stream-id").orElseThrow();
        HttpRequest rest = HttpRequest.newBuilder(URI.create(url + "/v1/streams/" + id + "/events"))
            .header("Last-Event-ID", lastId).build();
        CLIENT.send(rest, BodyHandlers.ofLines()).body().forEach(System.out::println);
    }

    /** A stream over a WebSocket: every text frame up to the terminal event. */
    static void websocket(String url, String json) throws Exception {
        CompletableFuture<Void> ended = new CompletableFuture<>();
        WebSocket.Listener listener = new WebSocket.Listener() {
            private final StringBuilder frame = new StringBuilder();

            @Override
            public CompletionStage<?> onText(WebSocket socket, CharSequence text, boolean isLast) {
                frame.append(text);
                if (isLast) {
                    System.out.println(frame);
                    if (frame.indexOf("\"status\"") >= 0) ended.complete(null);
                    frame.setLength(0);
                }
                socket.request(1);
                return null;
            }

            @Override
            public void onError(WebSocket socket, Throwable error) {
                ended.completeExceptionally(error);
            }
        };
        URI address = URI.create(url.replace("http:", "ws:") + "/v1/ws");
        WebSocket socket = CLIENT.newWebSocketBuilder().buildAsync(address, listener).join();
        socket.sendText(json, true).join();
        ended.join();
        socket.sendClose(WebSocket.NORMAL_CLOSURE, "").join();
    }
}
